// The console of the debug listener. Data is only ever put into the page as text, never as HTML.

const MAX_POINTS = 120;
const REFRESH_MS = 5000;
const TOKEN = 'tollkeeper-admin-token';
const THEME = 'tollkeeper-theme';

/** Creates an element: properties by name, `class`, `data-` and `aria-` as attributes, children as text or nodes. */
function element(name, attributes = {}, ...children) {
  const created = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith('on')) created.addEventListener(key.slice(2), value);
    else created.setAttribute(key, value === true ? '' : String(value));
  }
  created.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return created;
}

function svg(name, attributes = {}, ...children) {
  const created = document.createElementNS('http://www.w3.org/2000/svg', name);
  for (const [key, value] of Object.entries(attributes)) created.setAttribute(key, String(value));
  created.append(...children);
  return created;
}

const byId = (id) => document.getElementById(id);

// Text of numbers and times.

const whole = new Intl.NumberFormat('en', { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat('en', { maximumFractionDigits: 1 });
const number = (count) => (count === null || count === undefined ? '–' : whole.format(count));
const rate = (perSecond) => short.format(perSecond);
const share = (part, all) => (all > 0 ? `${short.format((100 * part) / all)} %` : '–');

function duration(us) {
  if (us === null || us === undefined) return '–';
  if (us < 1000) return `${number(us)} µs`;
  if (us < 1e6) return `${short.format(us / 1e3)} ms`;
  if (us < 120e6) return `${short.format(us / 1e6)} s`;
  if (us < 7200e6) return `${short.format(us / 60e6)} min`;
  if (us < 172800e6) return `${short.format(us / 3600e6)} h`;
  return `${short.format(us / 86400e6)} days`;
}

function timeOf(text) {
  const at = new Date(text);
  if (Number.isNaN(at.getTime())) return element('span', {}, text ?? '–');
  return element('time', { datetime: at.toISOString(), title: at.toISOString() }, at.toLocaleString());
}

/** Text of a client: control characters and marks that change the direction of text are spelled out. */
const printable = (text) =>
  text.replace(/[\u0000-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/g, (mark) => `\\u{${mark.codePointAt(0).toString(16)}}`);

// Requests to the server.

class PageError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function request(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { cache: 'no-store', credentials: 'omit', redirect: 'error', ...options });
  } catch {
    throw new PageError(0, 'The server does not answer. Is it running, and is the port-forward still open?');
  }
  const text = await response.text();
  if (!response.ok) throw new PageError(response.status, text.trim() || `The server answered ${response.status}.`);
  return text;
}

const getJson = async (path, options) => JSON.parse(await request(path, options));

function withQuery(path, query) {
  const search = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== '' && value !== undefined));
  return `${path}?${search}`;
}

/** A request with the admin token; asks for the token if there is none or it is wrong. */
async function adminRequest(path, options = {}) {
  for (;;) {
    const token = sessionStorage.getItem(TOKEN);
    if (!token) {
      if (!(await askForToken())) return null;
      continue;
    }
    try {
      return await request(path, { ...options, headers: { ...options.headers, authorization: `Bearer ${token}` } });
    } catch (error) {
      if (error.status !== 401 && error.status !== 403) throw error;
      sessionStorage.removeItem(TOKEN);
      showToken();
      if (!(await askForToken(error.message))) return null;
    }
  }
}

// Dialogs.

/** Shows a dialog; resolves to true if it was confirmed. `submit` may throw to keep it open with an error. */
function ask({ title, body, confirm, cancel = 'Cancel', danger = false, problem = '', submit = async () => {} }) {
  const dialog = byId('dialog');
  byId('dialog-title').textContent = title;
  byId('dialog-body').replaceChildren(...body);
  byId('dialog-error').textContent = problem;
  byId('dialog-cancel').textContent = cancel ?? '';
  byId('dialog-cancel').hidden = cancel === null;
  const ok = byId('dialog-ok');
  ok.textContent = confirm;
  ok.className = danger ? 'danger' : 'primary';
  return new Promise((resolve) => {
    const end = (confirmed) => {
      byId('dialog-form').onsubmit = null;
      dialog.onclose = null;
      if (dialog.open) dialog.close();
      resolve(confirmed);
    };
    byId('dialog-cancel').onclick = () => end(false);
    // The event of an earlier dialog may come after the next one was opened.
    dialog.onclose = () => dialog.open || end(false);
    byId('dialog-form').onsubmit = async (event) => {
      event.preventDefault();
      ok.disabled = true;
      try {
        await submit();
        end(true);
      } catch (error) {
        byId('dialog-error').textContent = error.message;
      } finally {
        ok.disabled = false;
      }
    };
    if (!dialog.open) dialog.showModal();
  });
}

async function askForToken(problem = '') {
  const input = element('input', { type: 'password', id: 'token-input', autocomplete: 'off', required: true });
  return ask({
    title: 'Admin token',
    body: [
      element('p', {}, 'Actions need the token of TOLLKEEPER_ADMIN_TOKEN. It is kept for this tab, until you close it.'),
      element('label', { for: 'token-input' }, 'Token '),
      input,
    ],
    confirm: 'Use this token',
    problem,
    submit: async () => {
      if (!input.value.trim()) throw new Error('Enter the token.');
      sessionStorage.setItem(TOKEN, input.value.trim());
      showToken();
    },
  });
}

function showToken() {
  byId('token').textContent = sessionStorage.getItem(TOKEN) ? 'Forget admin token' : 'Admin token';
}

/** Tells the result of an action. */
function tell(title, ...body) {
  return ask({ title, body, confirm: 'Close', cancel: null });
}

// Live figures.

const live = { last: null, points: [], listeners: new Set(), source: null, state: '', text: 'connecting', paused: '' };

function setConnection(state, text) {
  Object.assign(live, { state, text });
  showConnection();
}

/** Tells why the view is not refreshed; empty if it is. */
function setPaused(reason) {
  live.paused = reason;
  showConnection();
}

function showConnection() {
  const shown = byId('connection');
  const isPaused = live.state === 'live' && live.paused !== '';
  shown.dataset.state = isPaused ? '' : live.state;
  const text = isPaused ? live.paused : live.text;
  if (shown.textContent !== text) shown.textContent = text;
}

/** Asks why there are no events; a browser does not tell, and lets no more than six connections to a server wait. */
async function explainSilence() {
  const controller = new AbortController();
  const timer = setTimeout(() => controller.abort(), 5000);
  try {
    const response = await fetch('live', { cache: 'no-store', credentials: 'omit', signal: controller.signal });
    if (!response.ok) setConnection('lost', `no live figures: ${(await response.text()).trim()}`);
  } catch {
    if (live.state !== 'live') setConnection('lost', 'no live figures: the server does not answer, or other consoles hold all connections');
  } finally {
    clearTimeout(timer);
    controller.abort();
  }
}

function connect() {
  if (live.source || document.hidden) return;
  const source = new EventSource('live');
  live.source = source;
  const silence = setTimeout(() => live.source === source && explainSilence(), 5000);
  source.onmessage = (event) => {
    clearTimeout(silence);
    live.last = JSON.parse(event.data);
    live.points.push(live.last);
    if (live.points.length > MAX_POINTS) live.points.shift();
    setConnection('live', 'live');
    live.listeners.forEach((listener) => listener());
  };
  source.onerror = () => {
    clearTimeout(silence);
    setConnection('lost', 'disconnected, retrying');
    if (source.readyState === EventSource.CLOSED) {
      live.source = null;
      explainSilence();
      setTimeout(connect, 3000);
    }
  };
}

document.addEventListener('visibilitychange', () => {
  if (document.hidden) {
    live.source?.close();
    live.source = null;
    setConnection('', 'paused while hidden');
  } else {
    connect();
  }
});

// Parts that views share.

const perSecond = (point, count) => (point.interval_us > 0 ? (count * 1e6) / point.interval_us : 0);

function sparkline(values, kind, label) {
  const top = Math.max(...values, 1e-9);
  const step = values.length > 1 ? 300 / (values.length - 1) : 0;
  const points = values.map((value, index) => `${(index * step).toFixed(1)},${(40 - (36 * value) / top).toFixed(1)}`);
  const line = points.length > 0 ? `M${points.join('L')}` : '';
  return svg(
    'svg',
    { class: `spark ${kind}`, viewBox: '0 0 300 42', preserveAspectRatio: 'none', role: 'img', 'aria-label': label },
    svg('path', { class: 'area', d: line ? `${line}L${((values.length - 1) * step).toFixed(1)},42L0,42Z` : '' }),
    svg('path', { class: 'line', d: line }),
  );
}

function card(title, ...children) {
  return element('section', { class: 'card' }, element('h2', {}, title), ...children);
}

/** A table: columns are `{ title, cell, number }`, and `cell` returns text or nodes for a row. */
function table(caption, columns, rows, rowClass = () => undefined) {
  const cell = (column, row) => element('td', { class: column.number ? 'number' : column.class }, column.cell(row));
  return element(
    'div',
    { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': caption },
    element(
      'table',
      {},
      element('caption', {}, caption),
      element('thead', {}, element('tr', {}, columns.map(({ title, number: right }) =>
        element('th', { scope: 'col', class: right ? 'number' : undefined }, title)))),
      element('tbody', {}, rows.map((row) => element('tr', { class: rowClass(row) }, columns.map((c) => cell(c, row))))),
    ),
  );
}

function details(pairs) {
  return element('dl', {}, pairs.flatMap(([name, value]) => [element('dt', {}, name), element('dd', {}, value)]));
}

const empty = (text) => element('p', { class: 'soft' }, text);
const problemNotice = (text) => element('p', { class: 'notice bad', role: 'alert' }, text);

function modeBadge(limit) {
  if (limit.candidate) return element('span', { class: 'badge warn' }, 'candidate');
  if (limit.shadow_mode) return element('span', { class: 'badge warn' }, 'shadow mode');
  return null;
}

const ruleLink = (rule) => element('a', { href: `#/rules/${encodeURIComponent(rule)}` }, printable(rule));

function bounds(key) {
  const { rejected_at_least: least, rejected_at_most: most } = key;
  return least === most ? number(least) : `${number(least)} to ${number(most)}`;
}

function keysTable(caption, keys, withRule = true) {
  if (keys.length === 0) return empty('No hits were rejected in this time.');
  const columns = [
    { title: 'Rejected hits', number: true, cell: bounds },
    { title: 'Key', class: 'name', cell: keyCell },
  ];
  if (withRule) columns.push({ title: 'Limit', class: 'name', cell: (key) => ruleLink(key.rule) });
  return table(caption, columns, keys);
}

/** Opens a key, if its domain and values are known. */
const keyCell = (key) =>
  key.domain && key.entries?.length > 0 && key.entries.every((entry) => entry.value !== undefined && entry.value !== null)
    ? element('button', { class: 'link mono', onclick: () => showKey(key) }, printable(key.key))
    : element('span', { class: 'mono' }, printable(key.key));

function busiestTable(caption, keys = []) {
  if (keys.length === 0) return empty('No hits were counted in this time.');
  return table(caption, [
    { title: 'Hits, about', number: true, cell: (key) => number(key.hits_about) },
    { title: 'Key', class: 'name', cell: keyCell },
    { title: 'Limit', class: 'name', cell: (key) => ruleLink(key.rule) },
  ], keys);
}

/** Descriptors of this replica that matched no rule; empty if there are none. */
function unmatchedCard(report) {
  if (report.domains.length === 0) return '';
  const parts = report.findings.map((finding) => element('p', { class: 'notice' }, printable(finding.advice)));
  parts.push(element('p', { class: 'soft' }, report.domains.map((domain) =>
    `${printable(domain.domain)}: ${number(domain.unmatched)} unmatched, ${number(domain.matched)} matched`).join(' · ')));
  if (report.descriptors.length > 0) {
    parts.push(table('By keys, in the last five to ten minutes', [
      { title: 'About', number: true, cell: (row) => number(row.about) },
      { title: 'Domain', class: 'name', cell: (row) => printable(row.domain) },
      { title: 'Example', class: 'name', cell: (row) => element('span', { class: 'mono' }, printable(row.example)) },
      { title: 'Why', class: 'name', cell: (row) => printable(row.origin ? `${row.why} (${row.origin})` : row.why) },
    ], report.descriptors));
  }
  return card('Descriptors that matched no rule', ...parts);
}

const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hour: '2-digit', minute: '2-digit' });

/** Rejected hits by minute as columns, the current minute last; times are those of the browser, as everywhere here. */
function minuteColumns(minutes) {
  const top = Math.max(...minutes.map((minute) => minute.rejected_at_least), 1);
  const width = 100 / Math.max(minutes.length, 1);
  const bars = minutes.map((minute, index) => {
    const height = (78 * minute.rejected_at_least) / top;
    const at = index * width + width * 0.15;
    const bar = svg('rect', { x: at.toFixed(2), y: (80 - height).toFixed(2), width: (width * 0.7).toFixed(2), height: Math.max(height, 0).toFixed(2) });
    bar.append(svg('title', {}, document.createTextNode(`${clock(minute.start_s)}: at least ${number(minute.rejected_at_least)} hits rejected`)));
    return bar;
  });
  const text = minutes.map((minute) => `${clock(minute.start_s)} ${number(minute.rejected_at_least)}`).join(', ');
  return svg('svg', { class: 'columns', viewBox: '0 0 100 82', preserveAspectRatio: 'none', role: 'img', 'aria-label': `Rejected hits by minute: ${text}` },
    ...bars, svg('rect', { class: 'base', x: 0, y: 80, width: 100, height: 0.8 }));
}

function timeLine(report) {
  const minutes = report.by_minute ?? [];
  if (minutes.every((minute) => minute.rejected_at_least === 0)) return empty('Nothing was rejected in the last ten minutes.');
  return element('div', {},
    minuteColumns(minutes),
    element('p', { class: 'soft' }, `Rejected hits by minute, ${clock(minutes[0].start_s)} to ${clock(minutes.at(-1).start_s)}, at least.`));
}

// A key: its counters, and how full each limit is.

function counterRows(limits) {
  return table('Limits of the key', [
    { title: 'Limit', class: 'name', cell: (limit) => [limit.name ? `${printable(limit.name)}: ` : '', limit.limit ?? '', modeBadge(limit) ?? ''] },
    { title: 'Used', number: true, cell: ({ counter }) => (counter ? number(counter.used) : '–') },
    { title: 'Left', number: true, cell: ({ counter }) => (counter ? number(counter.remaining) : '–') },
    { title: 'Full', cell: ({ counter }) => fullness(counter) },
    { title: 'Passes', cell: ({ counter }) => passes(counter) },
  ], limits);
}

function fullness(counter) {
  if (!counter) return '–';
  const all = counter.used + counter.remaining;
  const full = counter.passes ? share(counter.used, all) : '100 %';
  const bar = element('meter', { min: 0, max: 1, value: counter.passes && all > 0 ? counter.used / all : 1, 'aria-label': full });
  return element('span', { class: 'meter' }, bar, full);
}

function passes(counter) {
  if (!counter) return '–';
  if (counter.passes) return element('span', { class: 'good' }, 'yes');
  const wait = counter.retry_after_us === null || counter.retry_after_us === undefined ? 'never' : `in ${duration(counter.retry_after_us)}`;
  return element('span', { class: 'bad' }, `no, ${wait}`);
}

const explainBody = (domain, entries) => JSON.stringify({ domain, descriptors: [{ entries }] });
const explain = (domain, entries) => getJson('explain', { method: 'POST', body: explainBody(domain, entries) });

const slotCounts = (slots) => (slots
  ? `${number(slots.taken)} taken, ${number(slots.freed)} freed, ${number(slots.expired_seats)} seats never released` : '');

function slotsInUse(slots) {
  const holders = slots.holders.map((holder) => element('li', {}, `${number(holder.slots)} of ${printable(holder.holder) || 'an Envoy without a name'}`));
  return [element('h3', {}, 'Slots in use'), details([
    ['Slots', `${number(slots.slots)}${slots.partial ? ' or more' : ''}, ${number(slots.seats)} seats`],
    ['Oldest', slots.oldest_s === undefined ? 'none' : `${number(slots.oldest_s)} s old, ends in ${number(slots.first_end_s)} s without a release`],
    ['Early releases', `${number(slots.tombstones)} in the last 15 s`],
  ]), element('ul', {}, holders)];
}

function explanation(explained) {
  const shown = explained.descriptors.map((descriptor) => element('section', { class: 'card' },
    element('h2', {}, printable(descriptor.descriptor)),
    details([
      ['Outcome', descriptor.outcome],
      ['Rule', descriptor.rule ? [ruleLink(descriptor.rule.path), ` ${descriptor.rule.origin}`] : 'none'],
    ]),
    descriptor.limits?.length > 0 ? counterRows(descriptor.limits) : null,
    ...(descriptor.slots ?? []).flatMap(slotsInUse),
    element('h3', {}, 'How it was matched'),
    element('ol', {}, descriptor.steps.map((step) => element('li', {},
      element('code', {}, printable(step.entry)),
      step.matched ? ` matched ${step.matched.join(' ')}` : ' matched nothing',
      step.near_misses?.length > 0 ? `; near: ${step.near_misses.map((miss) => (typeof miss === 'string' ? miss : JSON.stringify(miss))).join(', ')}` : ''))),
  ));
  if (explained.known_domain === false) shown.unshift(problemNotice('There are no rules for this domain.'));
  for (const block of explained.blocked ?? []) shown.unshift(problemNotice(`${printable(block.entry)} is blocked until ${block.until}: ${printable(block.reason)}`));
  return shown;
}

async function showKey(key) {
  const { domain } = key;
  const body = element('div', {}, 'Reading its counters.');
  const load = async () => {
    try {
      body.replaceChildren(...explanation(await explain(domain, key.entries)));
    } catch (error) {
      body.replaceChildren(problemNotice(error.message));
    }
  };
  load();
  const reset = await ask({
    title: `Key ${printable(key.key)}`,
    body: [element('p', { class: 'soft' }, `Domain ${printable(domain)}`), body, element('p', { class: 'soft' }, 'Resetting deletes its counters in all replicas: the key starts at zero.')],
    confirm: 'Reset its counters',
    cancel: 'Close',
    danger: true,
  });
  if (reset) await resetKey(domain, key.entries, printable(key.key));
}

async function resetKey(domain, entries, name) {
  try {
    const text = await adminRequest('reset', { method: 'POST', body: explainBody(domain, entries) });
    if (text === null) return;
    const { reset, announced } = JSON.parse(text);
    const deleted = reset.reduce((sum, count) => sum + count, 0);
    const others = announced === false ? ' The other replicas could not be told: their caches end within a second.' : '';
    await tell('Reset', element('p', {}, `${number(deleted)} counters of ${name} were deleted.${others}`));
  } catch (error) {
    await tell('Not reset', problemNotice(error.message));
  }
}

// Views. Each returns `{ refresh, onLive, every }`: refresh loads data and fills the view.

function overview(main) {
  const figures = element('div', { class: 'grid' });
  const state = element('div', { class: 'grid' });
  main.append(element('h1', {}, 'Overview'), figures, state);
  const draw = () => {
    const last = live.last;
    if (!last) {
      figures.replaceChildren(empty('Waiting for the first figures.'));
      return;
    }
    const series = (pick) => live.points.map((point) => perSecond(point, pick(point)));
    const requests = series((point) => point.requests);
    const rejected = series((point) => point.rejected);
    const decisions = Object.values(last.verdicts).reduce((sum, count) => sum + count, 0);
    const policy = last.verdicts.local + last.verdicts.allow + last.verdicts.deny + last.verdicts.error;
    figures.replaceChildren(
      card('Requests', element('p', { class: 'figure' }, rate(requests.at(-1)), element('small', {}, ' per second')),
        sparkline(requests, 'requests', `Requests per second in the last ${requests.length} seconds`)),
      card('Rejected requests', element('p', { class: 'figure' }, rate(rejected.at(-1)), element('small', {}, ' per second')),
        sparkline(rejected, 'rejected', `Rejected requests per second in the last ${rejected.length} seconds`)),
      card('Latency of decisions', element('p', { class: 'figure' }, duration(last.latency_us?.p99), element('small', {}, ' p99')),
        sparkline(live.points.map((point) => point.latency_us?.p99 ?? 0), 'latency', '99th percentile of latency'),
        element('p', { class: 'soft' }, `p50 ${duration(last.latency_us?.p50)} · p90 ${duration(last.latency_us?.p90)} · p99.9 ${duration(last.latency_us?.p999)}`)),
      card('Decisions of limits', element('p', { class: 'figure' }, rate(perSecond(last, decisions)), element('small', {}, ' per second')),
        mix(last.verdicts, policy),
        element('p', { class: 'soft' }, `passed ${share(last.verdicts.ok, decisions)} · rejected ${share(last.verdicts.over_limit, decisions)} · shadow ${share(last.verdicts.shadow, decisions)} · by policy ${share(policy, decisions)}`)),
    );
    const { store, rules, replicas } = last;
    state.replaceChildren(
      card('This process', element('p', { class: last.ready ? 'good' : 'bad' }, last.ready ? 'ready' : `not ready: ${last.not_ready_reason}`),
        last.draining ? element('p', { class: 'warn' }, 'stopping') : null),
      card('Store', element('p', { class: store.available ? 'good' : 'bad' }, `${store.kind}: ${store.available ? 'available' : 'lost'}`),
        details([['Servers', number(store.nodes)], ['Connections', number(store.connections)], ['Servers not used', number(store.available ? store.breakers_open : store.nodes)], ['Failed charges per second', rate(perSecond(last, store.failed_charges))]])),
      card('Rules', element('p', { class: rules.reload_failed ? 'bad' : 'good' }, rules.reload_failed ? 'the last reload failed' : 'loaded'),
        details([['Version', rules.source_version ?? rules.version], ['Loaded', rules.loaded_at_us ? timeOf(rules.loaded_at_us / 1000) : '–'], ['Domains', number(rules.domains)], ['Limits', number(rules.limits)]])),
      card('Replicas', element('p', {}, replicas ? `${number(replicas.live)} live` : 'counted with Redis only'),
        replicas ? details([['Slot', replicas.slot ?? 'none']]) : null, element('p', {}, element('a', { href: '#/fleet' }, 'All replicas'))),
    );
  };
  return { onLive: draw, refresh: async () => draw() };
}

function mix(verdicts, policy) {
  const parts = [['ok', verdicts.ok], ['over_limit', verdicts.over_limit], ['shadow', verdicts.shadow], ['policy', policy]];
  const total = parts.reduce((sum, [, count]) => sum + count, 0);
  const bar = element('div', { class: 'mix', 'aria-hidden': 'true' });
  for (const [kind, count] of parts.filter(([, part]) => part > 0)) {
    const part = element('span', { class: kind });
    part.style.width = `${(100 * count) / total}%`;
    bar.append(part);
  }
  return bar;
}

function fleet(main) {
  const body = element('div');
  main.append(element('h1', {}, 'Fleet'), body);
  const refresh = async () => {
    const report = await getJson('fleet?minutes=10&most=20');
    const silent = report.replicas.filter((replica) => replica.silent).length;
    const heard = report.replicas.length - silent;
    const parts = [];
    if (report.problem) parts.push(element('p', { class: 'notice' }, `This replica only: ${report.problem}.`));
    parts.push(element('div', { class: 'grid' },
      card('Replicas', element('p', { class: 'figure' }, number(heard), silent > 0 ? element('small', { class: 'bad' }, ` and ${number(silent)} silent`) : null)),
      card('Requests', element('p', { class: 'figure' }, rate(report.recent.calls_per_s), element('small', {}, ' per second'))),
      card('Rejected requests', element('p', { class: 'figure' }, rate(report.recent.rejected_per_s), element('small', {}, ' per second'))),
      card('Latency of decisions', element('p', { class: 'figure' }, duration(report.recent.latency_us?.p99), element('small', {}, ' p99')))));
    for (const finding of report.findings) {
      parts.push(element('p', { class: 'notice' }, element('strong', {}, finding.replicas.join(', ')), `: ${finding.advice}`));
    }
    for (const left of report.left_out) parts.push(element('p', { class: 'notice' }, `Left out: ${number(left.summaries)} summaries ${left.reason}.`));
    const store = ({ store: state }) => {
      if (!state.available) return element('span', { class: 'bad' }, `${state.kind}: lost`);
      if (state.breakers_open > 0) return element('span', { class: 'bad' }, `${state.breakers_open} of ${state.servers} lost`);
      return element('span', { class: 'good' }, state.kind);
    };
    parts.push(element('section', { class: 'card' }, table('Replicas, by the summaries that they publish every 5 s', [
      { title: 'Replica', class: 'name', cell: (replica) => [replica.name, replica.this ? element('span', { class: 'badge' }, 'this') : '', replica.silent ? element('span', { class: 'badge bad' }, `silent for ${number(replica.published_s_ago)} s`) : ''] },
      { title: 'Requests/s', number: true, cell: (replica) => rate(replica.recent.calls_per_s) },
      { title: 'Rejected/s', number: true, cell: (replica) => rate(replica.recent.rejected_per_s) },
      { title: 'p99', number: true, cell: (replica) => duration(replica.recent.latency_us?.p99) },
      { title: 'Store', cell: store },
      { title: 'Rules', cell: (replica) => [element('code', {}, replica.rules.hash.slice(0, 8) || 'none'), replica.rules.load_failed ? element('span', { class: 'badge bad' }, 'reload failed') : ''] },
      { title: 'Slot', number: true, cell: (replica) => number(replica.slot) },
      { title: 'Blocked values', number: true, cell: (replica) => number(replica.blocks.values) },
      { title: 'Clock', number: true, cell: (replica) => `${number(replica.clock_offset_ms)} ms` },
      { title: 'Version', cell: (replica) => replica.build },
      { title: 'Age', number: true, cell: (replica) => duration(replica.age_s * 1e6) },
    ], report.replicas)));
    if (report.blocked_values > 0) {
      parts.push(element('section', { class: 'card' }, table('Blocked values', [
        { title: 'Domain', class: 'name', cell: (block) => printable(block.domain) },
        { title: 'Key', class: 'name', cell: (block) => printable(block.key) },
        { title: 'Until', cell: (block) => timeOf(block.until) },
        { title: 'Reason', class: 'name', cell: (block) => printable(block.reason) },
      ], report.blocks), element('p', { class: 'soft' }, `${number(report.blocked_values)} in all; the values need the admin token.`),
        element('button', { type: 'button', onclick: listBlocks }, 'List blocked values')));
    }
    parts.push(element('section', { class: 'card' }, keysTable('Keys that all replicas rejected most in ten minutes', report.top.overall)));
    parts.push(element('section', { class: 'card' }, table('Limits over all replicas', [
      { title: 'Limit', class: 'name', cell: (limit) => [ruleLink(limit.rule), modeBadge(limit) ?? ''] },
      { title: 'Matched', number: true, cell: (limit) => number(limit.matched) },
      { title: 'Rejected', number: true, cell: (limit) => number(limit.rejected) },
      { title: 'Near', number: true, cell: (limit) => number(limit.near_limit_hits) },
      { title: 'Keys', number: true, cell: (limit) => number(limit.distinct_keys) },
      { title: 'Rejected keys', number: true, cell: (limit) => number(limit.distinct_rejected_keys) },
      { title: 'Slots', cell: (limit) => slotCounts(limit.slots) },
      { title: 'Replicas', number: true, cell: (limit) => number(limit.replicas) },
    ], report.rules)));
    body.replaceChildren(...parts);
  };
  return { refresh, every: REFRESH_MS };
}

function rules(main, [name]) {
  if (!name) return rulesTree(main);
  try {
    return ruleDetails(main, decodeURIComponent(name));
  } catch {
    main.append(element('h1', {}, 'Rules'), problemNotice('The address of this page is not the name of a limit.'));
    return { refresh: async () => {} };
  }
}

const LIMITS_PER_PAGE = 100;

function rulesTree(main) {
  const search = element('input', { type: 'search', id: 'search', placeholder: 'domain, key, value, file', autocomplete: 'off' });
  const only = element('input', { type: 'checkbox', id: 'only-findings' });
  const body = element('div');
  main.append(
    element('h1', {}, 'Rules'),
    element('div', { class: 'tools' },
      element('label', { for: 'search' }, 'Search', search),
      element('label', { for: 'only-findings' }, only, 'with findings only')),
    body);
  let offset = 0;
  const draw = (report) => {
    const domains = new Map();
    for (const limit of report.rules) {
      if (!domains.has(limit.domain)) domains.set(limit.domain, []);
      domains.get(limit.domain).push(limit);
    }
    const last = offset + report.rules.length;
    const text = report.rules.length > 0 ? `${number(offset + 1)} to ${number(last)} of ${number(report.limits)} limits` : '';
    const turn = (name, to, enabled) => element('button', { type: 'button', id: `page-${name}`, disabled: !enabled, onclick: () => page(to) }, name);
    const turns = element('p', { class: 'tools' }, element('span', { class: 'soft', role: 'status' }, text),
      turn('previous', offset - LIMITS_PER_PAGE, offset > 0), turn('next', offset + LIMITS_PER_PAGE, last < report.limits));
    const parts = [...domains].map(([domain, limits]) => element('section', { class: 'card' }, table(`Domain ${printable(domain)}`, [
      { title: 'Limit', class: 'name', cell: (limit) => [ruleLink(limit.rule), modeBadge(limit) ?? '', element('br'), element('span', { class: 'soft' }, limit.limit)] },
      { title: 'Matched', number: true, cell: (limit) => number(limit.matched) },
      { title: 'Rejected', number: true, cell: (limit) => number(limit.rejected) },
      { title: 'Share', number: true, cell: (limit) => share(limit.rejected, limit.matched) },
      { title: 'Near', number: true, cell: (limit) => number(limit.near_limit_hits) },
      { title: 'Keys', number: true, cell: (limit) => number(limit.distinct_keys) },
      { title: 'Position', cell: (limit) => element('span', { class: 'mono soft' }, printable(limit.origin)) },
      { title: 'Findings', cell: (limit) => limit.findings.map((finding) => element('span', { class: 'badge warn', title: finding.advice }, finding.kind.replaceAll('_', ' '))) },
    ], limits, (limit) => (limit.candidate ? 'child' : undefined))));
    body.replaceChildren(turns, ...(parts.length > 0 ? parts : [empty('No limit matches the search.')]));
  };
  let asked = 0;
  const refresh = async () => {
    asked += 1;
    const own = asked;
    const report = await getJson(withQuery('rules', { order: 'file', most: LIMITS_PER_PAGE, offset, search: search.value.trim(), found: only.checked || '' }));
    // A later search may have been answered before.
    if (own === asked) draw(report);
  };
  const page = (to) => {
    offset = Math.max(to, 0);
    load(refresh);
  };
  let typing = null;
  search.addEventListener('input', () => {
    clearTimeout(typing);
    typing = setTimeout(() => page(0), 200);
  });
  only.addEventListener('change', () => page(0));
  return { refresh, every: REFRESH_MS };
}

function ruleDetails(main, name) {
  const body = element('div');
  main.append(element('p', {}, element('a', { href: '#/rules' }, '← All rules')), element('h1', { class: 'mono' }, printable(name)), body);
  const refresh = async () => {
    const [report, top] = await Promise.all([
      getJson(withQuery('rules', { rule: name, exact: true })),
      getJson(withQuery('top', { rule: name, exact: true, minutes: 10, most: 20 })).catch((error) => error),
    ]);
    const limit = report.rules[0];
    if (!limit) {
      body.replaceChildren(problemNotice('No limit of the loaded rules has this name.'));
      return;
    }
    const ofRule = await getJson(withQuery('rules', { search: limit.origin, order: 'file', most: 20 }));
    const siblings = ofRule.rules.filter((found) => found.origin === limit.origin && found.rule_path === limit.rule_path);
    const parts = [element('section', { class: 'card' }, details([
      ['Limit', [limit.limit, modeBadge(limit) ?? '']],
      ['Position', element('code', {}, printable(limit.origin))],
      ['Counting since', duration(limit.age_s * 1e6)],
      ['Decisions', `${number(limit.matched)} matched, ${number(limit.rejected)} rejected (${share(limit.rejected, limit.matched)}), ${number(limit.near_limit_hits)} hits near the limit`],
      ['Distinct keys', `about ${number(limit.distinct_keys)}, of them about ${number(limit.distinct_rejected_keys)} rejected`],
      ...(limit.slots ? [['Slots', slotCounts(limit.slots)]] : []),
    ]))];
    for (const finding of limit.findings) parts.push(element('p', { class: 'notice' }, element('strong', {}, finding.kind.replaceAll('_', ' ')), `: ${finding.advice}`));
    if (siblings.length > 1) {
      parts.push(element('section', { class: 'card' }, table('Limits of the same rule, candidates beside those enforced', [
        { title: 'Limit', class: 'name', cell: (row) => [row.rule === name ? element('strong', {}, printable(row.rule)) : ruleLink(row.rule), modeBadge(row) ?? '', element('br'), element('span', { class: 'soft' }, row.limit)] },
        { title: 'Matched', number: true, cell: (row) => number(row.matched) },
        { title: 'Rejected', number: true, cell: (row) => number(row.rejected) },
        { title: 'Share', number: true, cell: (row) => share(row.rejected, row.matched) },
        { title: 'Rejected keys', number: true, cell: (row) => number(row.distinct_rejected_keys) },
      ], siblings)));
    }
    if (top instanceof Error) {
      parts.push(problemNotice(top.message));
    } else {
      parts.push(card('Time line', timeLine(top)), element('section', { class: 'card' }, keysTable('Keys rejected most in ten minutes', top.overall, false)));
    }
    parts.push(element('section', { class: 'card' }, element('h2', {}, 'Counters'),
      element('p', { class: 'soft' }, 'Lists up to 100 counters of the rule. Needs the admin token and is written to the audit log.'),
      element('button', { type: 'button', onclick: () => listCounters(limit) }, 'List counters')));
    body.replaceChildren(...parts);
  };
  return { refresh, every: REFRESH_MS };
}

async function listCounters(limit) {
  try {
    const text = await adminRequest(withQuery('counters', { domain: limit.domain, rule: limit.rule_path }));
    if (text === null) return;
    const listing = JSON.parse(text);
    const rows = listing.counters.flatMap((counter) => counter.limits.map((of) => ({ entries: counter.entries, counter: of })));
    await tell('Counters',
      element('p', { class: 'soft' }, `${listing.note}${listing.complete ? '' : '; there may be others'}`),
      rows.length === 0 ? empty('No counter is above zero.') : table('Counters', [
        { title: 'Key', class: 'name', cell: ({ entries }) => element('span', { class: 'mono' }, printable(entries.map((entry) => entry.join('=')).join(', '))) },
        { title: 'Used', number: true, cell: ({ counter }) => number(counter.used) },
        { title: 'Left', number: true, cell: ({ counter }) => number(counter.remaining) },
        { title: 'Passes', cell: ({ counter }) => passes(counter) },
      ], rows));
  } catch (error) {
    await tell('Counters', problemNotice(error.message));
  }
}

/** A blocked entry; bytes that are not UTF-8 are in base64. */
const entryText = (entry) => `${entry.key ?? `base64:${entry.key_base64}`}=${entry.value ?? `base64:${entry.value_base64}`}`;

async function listBlocks() {
  try {
    const text = await adminRequest('blocks');
    if (text === null) return;
    const { blocks, scope } = JSON.parse(text);
    await tell('Blocked values',
      element('p', { class: 'soft' }, scope === 'fleet' ? 'They hold for all replicas.' : 'They hold for this process only: its counters are not in Redis.'),
      blocks.length === 0 ? empty('Nothing is blocked.') : table('Blocked values', [
        { title: 'Domain', class: 'name', cell: (block) => printable(block.domain) },
        { title: 'Entry', class: 'name', cell: ({ entry }) => element('span', { class: 'mono' }, printable(entryText(entry))) },
        { title: 'Until', cell: (block) => timeOf(block.until) },
        { title: 'Reason', class: 'name', cell: (block) => printable(block.reason) },
        { title: '', cell: ({ domain, entry }) => element('button', { type: 'button', onclick: (event) => unblock(event.currentTarget, { domain, entry }) }, 'Unblock') },
      ], blocks));
  } catch (error) {
    await tell('Blocked values', problemNotice(error.message));
  }
}

async function unblock(button, block) {
  button.disabled = true;
  try {
    if ((await adminRequest('block', { method: 'DELETE', body: JSON.stringify(block) })) === null) return;
    button.textContent = 'Unblocked';
  } catch (error) {
    button.textContent = error.message;
  }
}

function keys(main) {
  const minutes = element('select', { id: 'minutes' }, ['1', '5', '10'].map((value) => element('option', { value, selected: value === '10' }, value === '1' ? 'this minute' : `last ${value} minutes`)));
  const of = element('select', { id: 'of' }, element('option', { value: 'top' }, 'this replica'), element('option', { value: 'fleet' }, 'all replicas'));
  const body = element('div');
  main.append(element('h1', {}, 'Keys'),
    element('div', { class: 'tools' }, element('label', { for: 'minutes' }, 'Time', minutes), element('label', { for: 'of' }, 'Of', of),
      element('button', { type: 'button', onclick: listBlocks }, 'List blocked values')), body);
  const refresh = async () => {
    const answer = await getJson(withQuery(of.value, { minutes: minutes.value, most: 50 }));
    const report = of.value === 'fleet' ? answer.top : answer;
    const unmatched = of.value === 'fleet' ? null : await getJson('unmatched');
    const missed = report.max_missed_hits === 0 ? 'No key is missing.' : `Every missing key had at most ${number(report.max_missed_hits)} rejected hits.`;
    body.replaceChildren(
      answer.problem ? element('p', { class: 'notice' }, `This replica only: ${answer.problem}.`) : '',
      of.value === 'top' ? card('Time line', timeLine(report)) : '',
      element('section', { class: 'card' }, keysTable('Keys rejected most', report.overall), element('p', { class: 'soft' }, missed)),
      element('section', { class: 'card' }, busiestTable(of.value === 'fleet' ? 'Busiest keys of ten minutes' : 'Busiest keys', report.busiest),
        element('p', { class: 'soft' }, 'Rejected or not; estimated from a sample of the decisions.')),
      unmatched ? unmatchedCard(unmatched) : '');
  };
  minutes.addEventListener('change', () => load(refresh));
  of.addEventListener('change', () => load(refresh));
  return { refresh, every: REFRESH_MS };
}

function explainView(main) {
  const domain = element('input', { type: 'text', id: 'domain', required: true, autocomplete: 'off' });
  const rows = element('div');
  const result = element('div', { role: 'status' });
  const add = () => {
    const row = element('div', { class: 'entry' },
      element('input', { type: 'text', 'aria-label': 'Key', placeholder: 'key', autocomplete: 'off' }),
      '=',
      element('input', { type: 'text', 'aria-label': 'Value', placeholder: 'value', autocomplete: 'off' }),
      element('button', { type: 'button', 'aria-label': 'Remove this entry', onclick: () => rows.children.length > 1 && row.remove() }, 'Remove'));
    rows.append(row);
  };
  add();
  const entries = () => [...rows.children].map((row) => {
    const [key, value] = row.querySelectorAll('input');
    return { key: key.value, value: value.value };
  }).filter(({ key }) => key !== '');
  const submit = async (event) => {
    event.preventDefault();
    try {
      result.replaceChildren(...explanation(await explain(domain.value, entries())));
    } catch (error) {
      result.replaceChildren(problemNotice(error.message));
    }
  };
  const reset = async () => {
    const name = entries().map(({ key, value }) => `${key}=${value}`).join(', ');
    const confirmed = await ask({
      title: 'Reset counters?',
      body: [element('p', {}, 'Deletes the counters of ', element('code', {}, name), ` in domain ${domain.value}, in all replicas. The key starts at zero.`)],
      confirm: 'Reset',
      danger: true,
    });
    if (confirmed) await resetKey(domain.value, entries(), name);
  };
  main.append(element('h1', {}, 'Explain'),
    element('p', { class: 'soft' }, 'Which rule a descriptor matches, and how full its limits are. Nothing is charged.'),
    element('form', { class: 'card', onsubmit: submit },
      element('p', {}, element('label', { for: 'domain' }, 'Domain '), domain),
      element('fieldset', {}, element('legend', {}, 'Entries'), rows, element('button', { type: 'button', onclick: add }, 'Add an entry')),
      element('div', { class: 'buttons' },
        element('button', { type: 'button', class: 'danger', onclick: reset }, 'Reset its counters'),
        element('button', { type: 'submit', class: 'primary' }, 'Explain'))),
    result);
  return { refresh: async () => {} };
}

function counts(title, of) {
  const rows = Object.entries(of ?? {});
  return card(title, rows.length === 0 ? element('p', { class: 'good' }, 'none since the start') : details(rows.map(([name, count]) => [name.replaceAll('_', ' '), number(count)])));
}

function failures(main) {
  const body = element('div');
  main.append(element('h1', {}, 'Failures'), body);
  const refresh = async () => {
    const [store, status, problems] = await Promise.all([getJson('store'), getJson('rlconfig/status'), getJson('problems')]);
    const servers = problems.servers ?? [];
    const parts = [element('div', { class: 'grid' },
      counts('Failed charges', store.failed_charges),
      counts('Decided by failure policy', store.decided_by_policy),
      card('Servers of the store', servers.length === 0 ? empty(`${store.store}: no server`) : details(servers.map((server) => [server.address, serverState(server, problems.store_available)]))))];
    if (status.last_error) {
      parts.push(element('section', { class: 'card' }, element('h2', {}, status.xds?.partly_applied_version ? 'Some domains were refused and keep their last rules; the others are in force' : 'The last reload failed; the rules before it are in force'),
        element('pre', {}, status.last_error), (problems.diagnostics ?? []).map(diagnostic)));
    }
    const log = problems.log ?? [];
    parts.push(element('section', { class: 'card' }, log.length === 0 ? empty('No warning or error was logged.') : table('Last warnings and errors of the log', [
      { title: 'Time', cell: (line) => timeOf(line.time) },
      { title: 'Level', cell: (line) => element('span', { class: line.level.toLowerCase() === 'error' ? 'bad' : 'warn' }, line.level.toLowerCase()) },
      { title: 'Message', class: 'name', cell: (line) => [line.message, line.times > 1 ? element('span', { class: 'badge' }, `${number(line.times)} times`) : '', fields(line.fields)] },
    ], [...log].reverse())));
    body.replaceChildren(...parts);
  };
  return { refresh, every: REFRESH_MS };
}

function serverState(server, isStoreAvailable) {
  if (server.is_breaker_open) return element('span', { class: 'bad' }, 'not used: breaker open');
  return isStoreAvailable ? element('span', { class: 'good' }, 'in use') : element('span', { class: 'bad' }, 'not reached');
}

function fields(of) {
  const pairs = Object.entries(of ?? {});
  return pairs.length === 0 ? '' : element('span', { class: 'mono soft' }, ` ${pairs.map(([name, value]) => `${name}=${value}`).join(' ')}`);
}

function diagnostic(found) {
  const lines = (found.lines ?? []).map(({ number: at, text }) => {
    const line = `${String(at).padStart(5)}  ${text}\n`;
    return at === found.line ? element('mark', {}, line) : line;
  });
  return element('div', {}, element('p', { class: 'mono' }, found.message ?? ''), lines.length > 0 ? element('pre', {}, lines) : '');
}

function settings(main) {
  const filter = element('input', { type: 'search', id: 'filter', placeholder: 'name or value', autocomplete: 'off' });
  const only = element('input', { type: 'checkbox', id: 'only-set' });
  const body = element('div');
  const level = element('div', { class: 'tools' });
  main.append(element('h1', {}, 'Settings'), level,
    element('div', { class: 'tools' }, element('label', { for: 'filter' }, 'Filter', filter), element('label', { for: 'only-set' }, only, 'set by the environment only')), body);
  let all = [];
  const draw = () => {
    const text = filter.value.toLowerCase();
    const shown = all.filter((setting) => (!only.checked || setting.set) && `${setting.name} ${setting.value}`.toLowerCase().includes(text));
    body.replaceChildren(element('section', { class: 'card' }, table(`${number(shown.length)} of ${number(all.length)} settings`, [
      { title: 'Name', class: 'name', cell: (setting) => element('code', {}, setting.name) },
      { title: 'Value', class: 'name', cell: (setting) => (setting.value === '' ? element('span', { class: 'soft' }, 'empty') : element('span', { class: 'mono' }, setting.value)) },
      { title: 'Origin', cell: (setting) => (setting.set ? 'environment' : element('span', { class: 'soft' }, 'default')) },
    ], shown)));
  };
  filter.addEventListener('input', draw);
  only.addEventListener('change', draw);
  const showLevel = async () => {
    const current = (await request('log_level')).trim();
    const choice = element('select', { id: 'level' }, ['panic', 'fatal', 'error', 'warn', 'info', 'debug', 'trace'].map((name) => element('option', { value: name, selected: name === current }, name)));
    level.replaceChildren(element('label', { for: 'level' }, 'Log level', choice), element('button', { type: 'button', onclick: () => changeLevel(choice.value, showLevel) }, 'Change'));
  };
  return {
    refresh: async () => {
      await showLevel();
      all = await getJson('settings');
      draw();
    },
  };
}

async function changeLevel(level, then) {
  const confirmed = await ask({
    title: 'Change the log level?',
    body: [element('p', {}, `This process logs from ${level} on, until it ends. At debug each decision is a line.`)],
    confirm: 'Change',
  });
  if (!confirmed) return;
  try {
    if ((await adminRequest('log_level', { method: 'PUT', body: level })) !== null) await then();
  } catch (error) {
    await tell('Not changed', problemNotice(error.message));
  }
}

// Choice of the view.

const VIEWS = { overview, fleet, rules, keys, explain: explainView, failures, settings };
let current = { timer: null, onLive: null, failed: null };

/** Place of an element below another: the index of each node on the way. */
function placeOf(node, root) {
  const place = [];
  for (; node && node !== root; node = node.parentElement) place.unshift([...node.parentElement.children].indexOf(node));
  return place;
}

const nodeAt = (place, root) => place.reduce((node, index) => node?.children[index], root);

/** Runs `update`, which replaces parts of the view, and restores focus and scrolling. */
async function keepingPlace(update) {
  const main = byId('main');
  const scrolled = () => [...main.querySelectorAll('.scroll')];
  const active = () => (main.contains(document.activeElement) && document.activeElement !== main ? document.activeElement : null);
  let focused = active();
  let place = focused && placeOf(focused, main);
  let positions = scrolled().map((node) => [node.scrollLeft, node.scrollTop]);
  const observer = new MutationObserver(() => {
    const now = nodeAt(place ?? [], main);
    if (focused && !focused.isConnected && !active() && now?.tagName === focused.tagName) now.focus({ preventScroll: true });
    scrolled().forEach((node, index) => positions[index] && node.scrollTo(...positions[index]));
    observer.disconnect();
  });
  const remember = () => {
    focused = active();
    place = focused && placeOf(focused, main);
    positions = scrolled().map((node) => [node.scrollLeft, node.scrollTop]);
  };
  document.addEventListener('focusin', remember);
  document.addEventListener('scroll', remember, true);
  observer.observe(main, { childList: true, subtree: true });
  try {
    await update();
  } finally {
    document.removeEventListener('focusin', remember);
    document.removeEventListener('scroll', remember, true);
    // The observer runs after this, unless nothing was replaced.
    setTimeout(() => observer.disconnect());
  }
}

async function load(refresh) {
  const shown = byId('load-error');
  try {
    await keepingPlace(refresh);
    if (shown) shown.textContent = '';
  } catch (error) {
    if (shown) shown.textContent = error.message;
  }
}

function show() {
  const [name, ...rest] = location.hash.replace(/^#\/?/, '').split('/');
  const chosen = Object.hasOwn(VIEWS, name) ? name : 'overview';
  clearInterval(current.timer);
  setPaused('');
  live.listeners.delete(current.onLive);
  const main = byId('main');
  main.replaceChildren(element('p', { id: 'load-error', class: 'error', role: 'alert' }));
  for (const link of document.querySelectorAll('nav a')) {
    if (link.getAttribute('href') === `#/${chosen}`) link.setAttribute('aria-current', 'page');
    else link.removeAttribute('aria-current');
  }
  const view = VIEWS[chosen](main, rest);
  document.title = `${chosen} · tollkeeper`;
  let busy = false;
  const refresh = async () => {
    // Selected text must not be replaced.
    const isSelected = main.contains(getSelection().anchorNode) && !getSelection().isCollapsed;
    setPaused(isSelected ? 'paused while text is selected' : '');
    if (busy || document.hidden || isSelected || byId('dialog').open) return;
    busy = true;
    await load(view.refresh);
    busy = false;
  };
  current = { onLive: view.onLive, timer: view.every ? setInterval(refresh, view.every) : null };
  if (view.onLive) live.listeners.add(view.onLive);
  load(view.refresh);
}

window.addEventListener('hashchange', () => {
  show();
  byId('main').focus();
});

// Theme and token.

const THEMES = ['system', 'light', 'dark'];

function applyTheme(theme) {
  if (theme === 'system') delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId('theme').textContent = `Theme: ${theme}`;
}

let theme = THEMES.includes(localStorage.getItem(THEME)) ? localStorage.getItem(THEME) : 'system';
applyTheme(theme);
byId('theme').addEventListener('click', () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  localStorage.setItem(THEME, theme);
  applyTheme(theme);
});

byId('token').addEventListener('click', () => {
  if (sessionStorage.getItem(TOKEN)) {
    sessionStorage.removeItem(TOKEN);
    showToken();
  } else {
    askForToken();
  }
});

showToken();
connect();
show();
