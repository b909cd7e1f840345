// Elements, text of numbers and times, and changes in place. Data is only ever put into the page as text, never as HTML.

const HANDLERS = ['onclick', 'oninput', 'onchange', 'onsubmit', 'onkeydown', 'onpointermove', 'onpointerleave'];

/** Children without those that are left out. */
const shownOf = (children) => children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false && child !== '');

/** Creates an element: attributes by name, handlers as `onclick`, children as text or nodes. */
export function element(name, attributes = {}, ...children) {
  const created = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (HANDLERS.includes(key)) created[key] = value;
    else created.setAttribute(key, value === true ? '' : String(value));
  }
  created.append(...shownOf(children));
  return created;
}

export function svg(name, attributes = {}, ...children) {
  const created = document.createElementNS('http://www.w3.org/2000/svg', name);
  for (const [key, value] of Object.entries(attributes)) {
    if (HANDLERS.includes(key)) created[key] = value;
    else created.setAttribute(key, String(value));
  }
  created.append(...children);
  return created;
}

export const byId = (id) => document.getElementById(id);

// Changes in place keep focus, selection, scrolling and open parts.

/** Makes the children of `parent` like these nodes and texts; nodes of one `data-key` are kept and moved. */
export function update(parent, ...children) {
  const focused = document.activeElement;
  const wanted = shownOf(children);
  patchChildren(parent, wanted.map((child) => (child instanceof Node ? child : document.createTextNode(String(child)))));
  if (focused !== document.activeElement && focused?.isConnected) focused.focus({ preventScroll: true });
}

const keyOf = (node) => node.dataset?.key;

function patchChildren(parent, wanted) {
  const keyed = new Map();
  for (const child of parent.childNodes) if (keyOf(child) !== undefined) keyed.set(keyOf(child), child);
  let at = parent.firstChild;
  for (const child of wanted) {
    const same = keyed.get(keyOf(child));
    if (same && same !== at) {
      // The node at this place is gone, or comes later.
      if (at && wanted.every((other) => keyOf(other) !== keyOf(at))) {
        const gone = at;
        at = at.nextSibling;
        gone.remove();
      }
      if (same !== at) parent.insertBefore(same, at);
      else at = at.nextSibling;
      patch(same, child);
      continue;
    }
    if (at && isAlike(at, child)) {
      const next = at.nextSibling;
      if (at !== child) patch(at, child);
      at = next;
    } else {
      parent.insertBefore(child, at);
    }
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

// A node with `data-own` is updated by its owner only.
const isAlike = (old, wanted) =>
  old === wanted || (old.nodeType === wanted.nodeType && old.nodeName === wanted.nodeName && keyOf(old) === keyOf(wanted) && old.dataset?.own === undefined && wanted.dataset?.own === undefined);

// An open part stays open; the policy of the page allows `style` as a property only.
const KEPT_ATTRIBUTES = ['open', 'style'];

function patch(old, wanted) {
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== wanted.data) old.data = wanted.data;
    return;
  }
  for (const { name } of [...old.attributes]) if (!wanted.hasAttribute(name) && !KEPT_ATTRIBUTES.includes(name)) old.removeAttribute(name);
  for (const { name, value } of wanted.attributes) if (name !== 'style' && old.getAttribute(name) !== value) old.setAttribute(name, value);
  for (const handler of HANDLERS) old[handler] = wanted[handler];
  if (wanted.style && old.style.cssText !== wanted.style.cssText) old.style.cssText = wanted.style.cssText;
  patchChildren(old, [...wanted.childNodes]);
}

// Text of numbers and times.

const whole = new Intl.NumberFormat('en', { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat('en', { maximumFractionDigits: 1 });
const isNone = (value) => value === null || value === undefined;
export const number = (count) => (isNone(count) ? '–' : whole.format(count));
export const rate = (perSecond) => short.format(perSecond);
export const share = (part, all) => (all > 0 ? `${short.format((100 * part) / all)} %` : '–');

/** Units of time in microseconds, each with the time from which the next one is used. */
const UNITS = [['µs', 1, 1e3], ['ms', 1e3, 1e6], ['s', 1e6, 120e6], ['min', 60e6, 7200e6], ['h', 3600e6, 172800e6], ['days', 86400e6, Infinity]];

export function duration(us) {
  if (isNone(us)) return '–';
  const [name, unit] = UNITS.find(([, , end]) => us < end);
  return `${short.format(us / unit)} ${name}`;
}

/** A percentile: the upper bound of its bucket. */
export const atMost = (us) => (isNone(us) ? '–' : `at most ${duration(us)}`);

/** Time of the day, in UTC as everywhere here. */
export const clock = (seconds, withSeconds = false) => new Date(seconds * 1000).toISOString().slice(11, withSeconds ? 19 : 16);

export function timeOf(text) {
  const at = new Date(text);
  if (Number.isNaN(at.getTime())) return element('span', {}, text ?? '–');
  const utc = at.toISOString();
  return element('time', { datetime: utc, title: `here: ${at.toLocaleString()}` }, `${utc.slice(0, 10)} ${utc.slice(11, 19)}`);
}

/** Text of a client, with invisible characters spelled out. */
export const printable = (text) =>
  String(text).replace(/[\p{Cc}\p{DI}\u2028\u2029\ufff9-\ufffb]/gu, (mark) => `\\u{${mark.codePointAt(0).toString(16)}}`);

// Parts that views share.

/** A card without a heading. */
export const box = (...children) => element('section', { class: 'card' }, ...children);
export const card = (title, ...children) => box(element('h2', {}, title), ...children);
export const grid = (...cards) => element('div', { class: 'grid' }, ...cards);
export const tools = (...controls) => element('p', { class: 'tools' }, ...controls);
export const span = (kind, ...children) => element('span', { class: kind }, ...children);
export const para = (...children) => element('p', {}, ...children);
export const heading = (...children) => element('h1', {}, ...children);
export const link = (href, ...children) => element('a', { href }, ...children);
export const button = (name, onclick, kind) => element('button', { type: 'button', class: kind, onclick }, name);
/** A label around its control. */
export const label = (...children) => element('label', {}, ...children);

/** A choice among values with their names. */
export const select = (id, options, chosen) =>
  element('select', { id }, options.map(([value, name]) => element('option', { value, selected: value === chosen }, name)));

export const figure = (title, value, unit, ...rest) => card(title, element('p', { class: 'figure' }, value, element('small', {}, ` ${unit}`)), ...rest);

/** A column of the numbers that rows have in a field. */
export const countColumn = (title, field) => numberColumn(title, (row) => number(row[field]));

export const numberColumn = (title, cell) => ({ title, number: true, cell });
/** A column of names, as wide as they need. */
export const nameColumn = (title, cell) => ({ title, class: 'name', cell });

/** A table of columns `{ title, cell, number }`; `cell` returns text or nodes, `key` identifies a row. */
export function table(caption, columns, rows, { rowClass = () => undefined, key, open } = {}) {
  const cell = (column, row) => element('td', { class: column.number ? 'number' : column.class }, column.cell(row));
  const seen = new Set();
  const line = (row) => {
    const name = key?.(row);
    const isNew = name !== undefined && !seen.has(name);
    seen.add(name);
    // A link in the row does the same for the keyboard.
    const onclick = open && ((event) => !event.target.closest('a, button') && getSelection().isCollapsed && open(row));
    return element('tr', { class: [rowClass(row), open && 'opens'].filter(Boolean).join(' ') || undefined, 'data-key': isNew ? name : undefined, onclick }, columns.map((column) => cell(column, row)));
  };
  return element(
    'div',
    { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': caption },
    element(
      'table',
      {},
      element('caption', {}, caption),
      element('thead', {}, element('tr', {}, columns.map(({ title, number: right }) =>
        (title ? element('th', { scope: 'col', class: right ? 'number' : undefined }, title) : element('td', {}))))),
      element('tbody', {}, rows.map(line)),
    ),
  );
}

export function details(pairs) {
  return element('dl', {}, pairs.filter(Boolean).flatMap(([name, value]) => [element('dt', {}, name), element('dd', {}, value)]));
}

/** Text of less weight. */
export const soft = (...text) => element('p', { class: 'soft' }, text);
export const notice = (...children) => element('p', { class: 'notice' }, ...children);
export const problemNotice = (text) => element('p', { class: 'notice bad', role: 'alert' }, text);
export const badge = (text, kind = '', title = undefined) => element('span', { class: `badge ${kind}`, title }, text);
/** Text with its line ends, which can be scrolled by the keyboard. */
export const pre = (label, ...children) => element('pre', { tabindex: 0, role: 'region', 'aria-label': label }, ...children);
export const code = (text) => element('code', {}, text);

export function modeBadge(limit) {
  if (limit.candidate) return badge('candidate', 'warn');
  return limit.shadow_mode ? badge('shadow mode', 'warn') : null;
}

/** Copies a text, or selects it where the browser forbids that. */
export function copyButton(name, text) {
  const copy = async (event) => {
    const button = event.currentTarget;
    const copied = typeof text === 'function' ? text() : text;
    try {
      await navigator.clipboard.writeText(copied);
      button.textContent = 'Copied';
    } catch {
      const shown = element('textarea', { rows: 3, readonly: true, 'aria-label': name, class: 'copy' });
      shown.value = copied;
      button.after(shown);
      shown.select();
      button.textContent = 'Press Ctrl+C';
    }
    setTimeout(() => { button.textContent = name; }, 1500);
  };
  return button(name, copy);
}

export const copyLink = () => copyButton('Copy link', () => location.href);

export const quoteForShell = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`);

/** A command line of `curl` for a page of this listener. */
export const curlOf = (path, body) =>
  ['curl', '-s', quoteForShell(new URL(path, location.href.replace(/#.*/, '')).href), ...(body ? ['-d', quoteForShell(body)] : [])].join(' ');

/** A command line of `tollkeeper explain` for a request. */
export function explainCommand({ domain, descriptors }) {
  const escape = (text) => text.replace(/[\\,=]/g, '\\$&');
  const texts = descriptors.map(({ entries }) => entries.map(({ key, value }) => `${escape(key)}=${escape(value)}`).join(','));
  return ['tollkeeper', 'explain', '--addr', location.host, '--domain', quoteForShell(domain), ...texts.flatMap((text) => ['--descriptor', quoteForShell(text)])].join(' ');
}
