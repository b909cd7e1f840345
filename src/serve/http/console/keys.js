// Views of keys: those rejected most and with most hits, one key, and the sandbox.

import { box, button, card, code, copyButton, copyLink, countColumn, curlOf, details, duration, element, explainCommand, heading, label, link, modeBadge, nameColumn, notice, number, numberColumn, para, pre, printable, problemNotice, rate, select, share, soft, span, table, timeOf, tools, update } from './dom.js';
import { adminRequest, ask, explain, explainBody, getJson, keyAddress, readAddress, resetCounters, ruleAddress, searchInput, tell, withQuery, writeState } from './server.js';

export const ruleLink = (rule) => link(ruleAddress(rule), printable(rule));
const isWhole = (entries) => entries?.length > 0 && entries.every(({ value }) => value !== undefined && value !== null);

/** Opens a key, if its domain and values are known. */
export function keyLink({ domain, entries, key }) {
  return domain && isWhole(entries)
    ? element('a', { class: 'mono', href: keyAddress(domain, entries) }, printable(key))
    : span('mono', printable(key));
}

function bounds({ rejected_at_least: least, rejected_at_most: most }) {
  return least === most ? number(least) : `${number(least)} to ${number(most)}`;
}

const keyName = (row) => `${row.rule} ${row.key}`;

const keyColumns = (withRule) => [nameColumn('Key', keyLink), ...(withRule ? [nameColumn('Limit', (key) => ruleLink(key.rule))] : [])];

export function rejectedTable(caption, keys, withRule = true) {
  if (keys.length === 0) return soft('No hits were rejected in this time.');
  return table(caption, [numberColumn('Rejected hits', bounds), countColumn('Requests', 'requests_at_least'), ...keyColumns(withRule)], keys, { key: keyName });
}

export function busiestTable(caption, keys = [], withRule = true) {
  if (keys.length === 0) return soft('No hits were counted in this time.');
  return table(caption, [countColumn('Hits, about', 'hits_about'), ...keyColumns(withRule)], keys, { key: keyName });
}

function unmatchedCard(report) {
  if (!report || report.domains.length === 0) return null;
  const parts = report.findings.map((finding) => notice(printable(finding.advice)));
  parts.push(soft(report.domains.map((domain) =>
    `${printable(domain.domain)}: ${number(domain.unmatched)} unmatched, ${number(domain.matched)} matched`).join(' · ')));
  if (report.descriptors.length > 0) {
    parts.push(table('By keys, in the last five to ten minutes', [
      countColumn('About', 'about'),
      nameColumn('Domain', (row) => printable(row.domain)),
      nameColumn('Example', (row) => keyLink({ ...row, key: row.example })),
      nameColumn('Why', (row) => printable(row.origin ? `${row.why} (${row.origin})` : row.why)),
    ], report.descriptors));
  }
  return card('Descriptors that matched no rule', ...parts);
}

export function keys(main) {
  const { state } = readAddress();
  const minutes = select('minutes', [['1', 'this minute'], ['5', 'last 5 minutes'], ['10', 'last 10 minutes']], state.get('minutes') ?? '5');
  const of = select('of', [['top', 'this replica'], ['fleet', 'all replicas']], state.get('of'));
  const rule = searchInput('rule', 'shop.user');
  const body = element('div');
  main.append(heading('Keys'),
    tools(label('Time', minutes), label('Of', of), label('Limit', rule),
      button('List blocked values', listBlocks),
      copyLink(), copyButton('Copy curl', () => curlOf(withQuery(of.value, { minutes: minutes.value, rule: rule.value.trim(), format: 'text' })))), body);
  const refresh = async () => {
    const ofFleet = of.value === 'fleet';
    const [answer, unmatched] = await Promise.all([
      getJson(withQuery(of.value, { minutes: minutes.value, most: 50, rule: rule.value.trim() })),
      ofFleet ? null : getJson('unmatched'),
    ]);
    const report = ofFleet ? answer.top : answer;
    const missed = report.max_missed_hits === 0 ? 'No key is missing.' : `Every missing key had at most ${number(report.max_missed_hits)} rejected hits.`;
    return () => update(body,
      answer.problem ? notice(`This replica only: ${answer.problem}.`) : null,
      box(rejectedTable('Keys rejected most', report.overall), soft(missed)),
      box(busiestTable(ofFleet ? 'Busiest keys of ten minutes' : 'Busiest keys', report.busiest),
        soft('Rejected or not; estimated from a sample of the decisions.')),
      unmatchedCard(unmatched));
  };
  const change = () => {
    writeState({ minutes: minutes.value === '5' ? '' : minutes.value, of: of.value === 'top' ? '' : of.value, rule: rule.value.trim() });
    return refresh();
  };
  return { refresh, every: 5, change: [minutes, of, rule].map((control) => [control, change]) };
}

// A request and its limits.

function counterTable(descriptor, limits) {
  return table(`What each limit says of one more hit of ${printable(descriptor)}`, [
    nameColumn('Limit', (limit) => [limit.name ? `${printable(limit.name)}: ` : '', limit.limit ?? '', modeBadge({ candidate: limit.candidate, shadow_mode: limit.shadow_mode })]),
    { title: 'Says', cell: (limit) => verdict(limit.counter, limit.shadow_mode || limit.candidate) },
    numberColumn('Used', ({ counter }) => number(counter?.used)),
    numberColumn('Left', ({ counter }) => number(counter?.remaining)),
    { title: 'Full', cell: ({ counter }) => fullness(counter) },
  ], limits);
}

function fullness(counter) {
  if (!counter) return '–';
  const all = counter.used + counter.remaining;
  const full = counter.passes ? share(counter.used, all) : '100 %';
  const bar = element('meter', { min: 0, max: 1, low: 0.8, high: 0.99, optimum: 0, value: counter.passes && all > 0 ? counter.used / all : 1, 'aria-label': `full: ${full}` });
  return span('meter', bar, full);
}

export function verdict(counter, isShadow = false) {
  if (!counter) return span('warn', 'not known: the store failed');
  if (counter.banned_us > 0) return span('bad', `banned for ${duration(counter.banned_us)}`);
  const by = counter.local ? ' (local: the store failed)' : '';
  if (counter.passes) return span(by ? 'warn' : 'good', `passes${by}`);
  const wait = counter.retry_after_us === null || counter.retry_after_us === undefined ? 'never' : `in ${duration(counter.retry_after_us)}`;
  return span(isShadow ? 'warn' : 'bad', `${isShadow ? 'would reject' : 'rejects'}; passes ${wait}${by}`);
}

/** The limits of a rule as a rule file. */
export const ruleYaml = (text) => (text?.yaml ? pre('YAML', printable(text.yaml).replaceAll('\\u{a}', '\n')) : null);

/** Texts of the rules that an explanation names, by their origin. */
async function loadRuleTexts(explained) {
  const origins = new Set(explained.descriptors.map(({ rule }) => rule?.origin).filter(Boolean));
  const load = async (origin) => [origin, await getJson(withQuery('rule_text', { origin })).catch(() => null)];
  return new Map(await Promise.all([...origins].map(load)));
}

function slotsInUse(slots) {
  const holders = slots.holders.map((holder) => element('li', {}, `${number(holder.slots)} of ${printable(holder.holder) || 'an Envoy without a name'}`));
  return [element('h3', {}, 'Slots in use'), details([
    ['Slots', `${number(slots.slots)}${slots.partial ? ' or more' : ''}, ${number(slots.seats)} seats`],
    ['Oldest', slots.oldest_s === undefined ? 'none' : `${number(slots.oldest_s)} s old, ends in ${number(slots.first_end_s)} s without a release`],
    ['Early releases', `${number(slots.tombstones)} in the last 15 s`],
  ]), element('ul', {}, holders)];
}

/** What this replica holds of a key's limits for proxies, and what each proxy has of that, until when. */
export function sharesOf(name, { limits, proxies, proxy_count: all, store_failed: isFailed }) {
  const held = limits.map((limit) => [limit.limit,
    `${number(limit.held)} hits${limit.form === 'rate' ? ' per period' : ''} held for ${number(limit.held_for_s)} s, ${number(limit.free)} of them free`]);
  return [isFailed ? problemNotice('The store does not answer: what is held ends then.') : null, details(held),
    proxies.length > 0 ? table(`${number(proxies.length)} of ${number(all)} proxies of ${printable(name)}, those with most hits first`, [
      nameColumn('Proxy', (proxy) => `${printable(proxy.peer) || 'Unix socket'}, stream ${proxy.stream}`),
      countColumn('Hits', 'reserved'),
      numberColumn('Ends in', (proxy) => `${number(proxy.ends_s)} s`),
      { title: 'Assignment', cell: (proxy) => printable(proxy.assignment) },
      numberColumn('Demand/s', (proxy) => rate(proxy.demand_per_s)),
    ], proxies, { key: (proxy) => proxy.stream }) : soft('No proxy has a part.')];
}

function explanation(explained, texts) {
  const shown = explained.descriptors.map((descriptor) => {
    const text = texts.get(descriptor.rule?.origin);
    const miss = descriptor.near_miss;
    return box(
      element('h2', { class: 'mono' }, printable(descriptor.descriptor)),
      details([
        ['Outcome', printable(descriptor.outcome)],
        ['Rule', descriptor.rule ? [ruleLink(text?.limits[0]?.rule ?? descriptor.rule.path), ' ', code(printable(descriptor.rule.origin))] : 'none'],
        descriptor.rule?.plan && ['Plan', printable(descriptor.rule.plan.reason)],
        miss && ['Near', printable(miss.origin ? `${miss.why} (${miss.origin})` : miss.why)],
      ]),
      descriptor.limits?.length > 0 ? counterTable(descriptor.descriptor, descriptor.limits) : null,
      (descriptor.slots ?? []).flatMap(slotsInUse),
      descriptor.quota ? [element('h3', {}, 'Held by proxies'), sharesOf(descriptor.descriptor, descriptor.quota)] : null,
      text?.yaml ? [element('h3', {}, 'The rule, as it was loaded'), ruleYaml(text), tools(copyButton('Copy YAML', () => text.yaml))] : null,
      element('details', {}, element('summary', {}, 'How it was matched'), element('ol', {}, descriptor.steps.map((step) => element('li', {},
        code(printable(step.entry)),
        step.matched ? ` matched ${printable(step.matched.join(' '))}` : ' matched nothing',
        step.other_matches?.length > 0 ? `; also: ${step.other_matches.map((other) => printable(other.join(' '))).join(', ')}` : '')))));
  });
  if (explained.known_domain === false) shown.unshift(problemNotice('There are no rules for this domain.'));
  for (const block of explained.blocked ?? []) shown.unshift(problemNotice(`${printable(block.entry)} is blocked until ${block.until}: ${printable(block.reason)}`));
  return shown;
}

const copies = (asked) => [
  copyLink(),
  copyButton('Copy explain', () => explainCommand(asked)),
  copyButton('Copy curl', () => curlOf('explain', explainBody(asked))),
];

const textOf = (entries) => entries.map(({ key, value }) => `${printable(key)}=${printable(value)}`).join(', ');

export function key(main) {
  const { state } = readAddress();
  const domain = state.get('domain') ?? '';
  const values = state.getAll('v');
  const entries = state.getAll('k').map((name, at) => ({ key: name, value: values[at] ?? '' }));
  const asked = { domain, descriptors: [{ entries }] };
  const body = element('div');
  main.append(heading('Key ', span('mono', textOf(entries))),
    soft(`Domain ${printable(domain)}. Nothing is charged by looking.`),
    tools(copies(asked), link(sandboxAddress(asked), 'Change it in the sandbox'),
      button('Reset its counters', () => resetCounters(asked, textOf(entries)), 'danger'),
      button('Block it', () => blockValue(domain, entries), 'danger')), body);
  return {
    every: 5,
    refresh: async () => {
      const explained = await explain(asked);
      const texts = await loadRuleTexts(explained);
      return () => update(body, explanation(explained, texts));
    },
  };
}

// The sandbox.

const textOfRequest = ({ domain, descriptors }) => {
  const escape = (text) => text.replace(/[\\,=]/g, '\\$&');
  const lines = descriptors.map(({ entries }) => entries.map(({ key: name, value }) => `${escape(name)}=${escape(value)}`).join(','));
  return `${domain}: ${lines.join('\n')}`;
};

const sandboxAddress = (asked) => `#/sandbox?${new URLSearchParams({ text: textOfRequest(asked) })}`;

/** Entries of `key=value,key=value`, in which `\` escapes. */
function parseEntries(text) {
  const entries = [];
  let entry = { key: '', value: undefined };
  const add = (mark) => (entry.value === undefined ? (entry.key += mark) : (entry.value += mark));
  for (let at = 0; at < text.length; at += 1) {
    const mark = text[at];
    if (mark === '\\' && at + 1 < text.length) add(text[(at += 1)]);
    else if (mark === '=' && entry.value === undefined) entry.value = '';
    else if (mark === ',') {
      entries.push(entry);
      entry = { key: '', value: undefined };
    } else add(mark);
  }
  entries.push(entry);
  return entries.map(({ key: name, value }) => ({ key: name.trim(), value: (value ?? '').trim() }));
}

/** The first object in some JSON that has descriptors. */
function findRequest(value, domain) {
  if (!value || typeof value !== 'object') return null;
  const own = typeof value.domain === 'string' ? value.domain : domain;
  if (Array.isArray(value.descriptors)) return { domain: own, descriptors: value.descriptors };
  if (typeof value.descriptors === 'string') return { domain: own, text: value.descriptors };
  for (const part of Object.values(value)) {
    const found = findRequest(part, own);
    if (found) return found;
  }
  return null;
}

function jsonIn(text) {
  const [from, to] = [text.indexOf('{'), text.lastIndexOf('}')];
  if (from < 0 || to < from) return null;
  try {
    return JSON.parse(text.slice(from, to + 1));
  } catch {
    return null;
  }
}

/** Descriptors of a debug line of the log: `user=ann -> shop.user (...): ...; ...`. */
const descriptorsOfLog = (text) => text.split('; ').map((part) => ({ entries: parseEntries(part.split(/ -> | \(\d+ hits\)|: /)[0]) }));

function unquote(text) {
  try {
    return JSON.parse(`"${text}"`);
  } catch {
    return text;
  }
}

export function parseRequest(text) {
  const json = jsonIn(text);
  const found = json && findRequest(json, undefined);
  if (found?.text !== undefined) return { domain: found.domain ?? '', descriptors: descriptorsOfLog(found.text) };
  if (found) {
    if (!found.domain) throw new Error('The request has descriptors and no "domain": add it.');
    const entry = (of) => {
      if (typeof of === 'string') return { key: of.split('=', 1)[0], value: of.slice(of.indexOf('=') + 1) };
      const { key: name, value, value_hash: hash, key_base64: raw } = of;
      if (name === undefined || raw !== undefined) throw new Error('An entry is not text: send it to /explain as it is.');
      if (value === undefined && hash !== undefined) throw new Error(`The value of ${name} is hashed in this line (TOLLKEEPER_DECISION_LOG_VALUES): put the value in its place.`);
      return { key: String(name), value: String(value ?? '') };
    };
    return { domain: found.domain, descriptors: found.descriptors.map(({ entries }) => ({ entries: (entries ?? []).map(entry) })) };
  }
  const log = /\bdomain="?([^"\s]+)"?.*\bdescriptors="((?:[^"\\]|\\.)*)"/s.exec(text);
  if (log) return { domain: log[1], descriptors: descriptorsOfLog(unquote(log[2])) };
  const plain = /^\s*([^\s:={}]+):\s*(\S.*)$/s.exec(text);
  if (plain && plain[2].includes('=')) {
    return { domain: plain[1], descriptors: plain[2].split('\n').filter((line) => line.trim()).map((line) => ({ entries: parseEntries(line) })) };
  }
  throw new Error('This is no request. Paste JSON of /json, a line of a log, or "domain: key=value,key=value".');
}

export function sandbox(main, { load }) {
  const { state } = readAddress();
  const input = element('textarea', { id: 'request', rows: 5, spellcheck: 'false', placeholder: 'shop: user=ann,path=/login' });
  input.value = state.get('text') ?? '';
  const result = element('div');
  const show = async () => {
    if (!input.value.trim()) return () => update(result);
    try {
      const asked = parseRequest(input.value);
      const explained = await explain(asked);
      const texts = await loadRuleTexts(explained);
      return () => update(result,
        tools(copies(asked), asked.descriptors.length === 1 ? link(keyAddress(asked.domain, asked.descriptors[0].entries), 'Open as a key') : null,
          button('Reset its counters', () => resetCounters(asked, asked.descriptors.map(({ entries }) => textOf(entries)).join('; ')), 'danger')),
        explanation(explained, texts));
    } catch (error) {
      return () => update(result, problemNotice(error.message));
    }
  };
  const submit = (event) => {
    event.preventDefault();
    writeState({ text: input.value.trim() });
    return load(show);
  };
  input.onkeydown = (event) => event.key === 'Enter' && (event.ctrlKey || event.metaKey) && submit(event);
  main.append(heading('Sandbox'),
    soft('Which rule a request matches, and what each limit would say. Nothing is charged.'),
    element('form', { class: 'card', onsubmit: submit },
      para(element('label', { for: 'request' }, 'A request, or a line of a log')),
      input,
      soft('JSON of /json, a line of the decision, debug or access log, or "domain: key=value,key=value".'),
      element('div', { class: 'buttons' }, element('button', { type: 'submit', class: 'primary' }, 'Show what would happen'))),
    result);
  return { refresh: show, every: 5 };
}

// Blocked values.

/** A blocked entry; bytes that are not UTF-8 are in base64. */
const entryText = (entry) => `${entry.key ?? `base64:${entry.key_base64}`}=${entry.value ?? `base64:${entry.value_base64}`}`;

export async function listBlocks() {
  try {
    const text = await adminRequest('blocks');
    if (text === null) return;
    const { blocks, scope } = JSON.parse(text);
    await tell('Blocked values',
      soft(scope === 'fleet' ? 'They hold for all replicas.' : 'They hold for this process only: its counters are not in Redis.'),
      blocks.length === 0 ? soft('Nothing is blocked.') : table('Blocked values', [
        nameColumn('Domain', (block) => printable(block.domain)),
        nameColumn('Entry', ({ entry }) => span('mono', printable(entryText(entry)))),
        { title: 'Until', cell: (block) => timeOf(block.until) },
        nameColumn('Reason', (block) => printable(block.reason)),
        { title: '', cell: ({ domain, entry }) => button('Unblock', (event) => unblock(event.currentTarget, { domain, entry })) },
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

async function blockValue(domain, entries) {
  const entry = select('block-entry', entries.map((one, at) => [at, textOf([one])]));
  const time = select('block-for', ['10m', '1h', '24h'].map((name) => [name, name]));
  const reason = element('input', { type: 'text', id: 'block-reason', required: true, autocomplete: 'off' });
  try {
    const blocked = await ask({
      title: 'Block a value?',
      body: [
        para(`Every request of domain ${printable(domain)} that has this entry is rejected, before any rule.`),
        para(element('label', { for: 'block-entry' }, 'Entry '), entry),
        para(element('label', { for: 'block-for' }, 'For '), time),
        para(element('label', { for: 'block-reason' }, 'Reason '), reason)],
      confirm: 'Block',
      danger: true,
    });
    if (!blocked) return;
    const body = JSON.stringify({ domain, entry: entries[Number(entry.value)], for: time.value, reason: reason.value });
    if ((await adminRequest('block', { method: 'POST', body })) !== null) await tell('Blocked', para(`${textOf([entries[Number(entry.value)]])} is blocked for ${time.value}.`));
  } catch (error) {
    await tell('Not blocked', problemNotice(error.message));
  }
}

