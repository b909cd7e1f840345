// Views of replicas and this process: fleet, one replica, failures, quotas, settings.

import { atMost, badge, box, button, card, code, copyButton, countColumn, details, duration, element, figure, grid, heading, label, link, nameColumn, notice, number, numberColumn, para, pre, printable, problemNotice, quoteForShell, rate, select, share, soft, span, table, timeOf, tools, update } from './dom.js';
import { hourChart, mix, requestSeries, sparkline } from './charts.js';
import { keyLink, listBlocks, rejectedTable, sharesOf } from './keys.js';
import { adminRequest, ask, getJson, readAddress, request, searchInput, tell, withQuery, writeState } from './server.js';

/** Parts of decisions by what became of the request; `local` split into passed and rejected. */
function verdictParts(verdicts) {
  return [
    ['ok', 'passed', verdicts.ok],
    ['over_limit', 'rejected', verdicts.over_limit],
    ['shadow', 'over the limit in shadow mode', verdicts.shadow],
    ['policy', 'local: passed', Math.max(verdicts.local - verdicts.local_rejected, 0)],
    ['policy_rejected', 'local: rejected', verdicts.local_rejected],
    ['policy', 'allow', verdicts.allow],
    ['policy_rejected', 'deny', verdicts.deny],
    ['other', 'error, or a candidate that was not charged', verdicts.error],
  ].map(([kind, title, count]) => ({ kind, title, count }));
}

function decisionsOf(title, { decisions_per_s: perSecond, verdicts }) {
  const parts = verdictParts(verdicts);
  const all = parts.reduce((sum, { count }) => sum + count, 0);
  const shown = parts.filter(({ count }, at) => at < 2 || count > 0);
  return figure(title, rate(perSecond), 'per second', mix(parts),
    element('p', { class: 'legend' }, shown.map(({ kind, title: name, count }) => element('span', {}, span(`sample ${kind}`), `${name} ${share(count, all)}`))));
}

const requestFigures = (recent) => [
  figure('Requests', rate(recent.calls_per_s), 'per second'),
  figure('Rejected requests', rate(recent.rejected_per_s), 'per second'),
  figure('Latency, p99', duration(recent.latency_us?.p99), 'at most'),
];

export function alarmList(report) {
  if (report === undefined) return null;
  if (!report) return notice('Alarms are not known.');
  if (report.alarms.length === 0) return element('p', { class: 'good' }, 'No alarm.');
  const views = { failures: 'store_lost server_not_used slots_not_served reload_failed answers_by_policy', keys: 'unmatched unmatched_descriptors almost_matches_rule mostly_rejected hot_key', replica: 'no_requests late', rules: 'xds_stream_lost rejections_rose_after_load' };
  const viewOf = (kind) => Object.keys(views).find((view) => views[view].split(' ').includes(kind));
  return element('ul', { class: 'alarms', 'aria-label': 'Alarms' }, report.alarms.map((alarm) => element('li', { class: 'notice bad' },
    element('strong', {}, alarm.replicas.join(', ') || alarm.kind), ': ', printable(alarm.text), ' ',
    span('soft', 'since ', timeOf(alarm.since), ': ', alarm.advice), ' ',
    viewOf(alarm.kind) ? link(`#/${viewOf(alarm.kind)}`, 'Look') : null)));
}

const replicaAddress = (one) => (one.this ? '#/replica' : `#/replica/${encodeURIComponent(one.incarnation)}`);

function storeState({ store }) {
  if (!store.available) return span('bad', `${store.kind}: lost`);
  if (store.breakers_open > 0) return span('bad', `${store.breakers_open} of ${store.servers} lost`);
  return span('good', store.kind);
}

function problemsOf({ name, silent, store, rules }, findings) {
  const named = findings.filter(({ replicas }) => replicas.includes(name)).length;
  return (silent ? 8 : 0) + (store.available ? 0 : 4) + (store.breakers_open > 0 ? 2 : 0) + (rules.load_failed ? 2 : 0) + named;
}

const clockOf = (ms) => `${number(Math.abs(ms))} ms ${ms < 0 ? 'ahead' : 'behind'}`;

const rateColumn = (title, field) => numberColumn(title, (one) => rate(one.recent[field]));

const replicaColumns = (findings) => [
  nameColumn('Replica', (one) => [link(replicaAddress(one), printable(one.name)), one.this ? badge('this') : null,
    one.silent ? badge(`silent for ${number(one.published_s_ago)} s`, 'bad') : problemsOf(one, findings) > 0 ? badge('problem', 'bad') : null]),
  rateColumn('Requests/s', 'calls_per_s'),
  rateColumn('Rejected/s', 'rejected_per_s'),
  numberColumn('p99 at most', ({ recent }) => duration(recent.latency_us?.p99)),
  { title: 'Store', cell: storeState },
  { title: 'Rules', cell: ({ rules }) => [code(rules.hash.slice(0, 8) || 'none'), rules.load_failed ? badge('reload failed', 'bad') : null] },
  countColumn('Place', 'slot'),
  numberColumn('Blocked values', ({ blocks }) => number(blocks.values)),
  numberColumn('Clock', ({ clock_offset_ms: ms }) => clockOf(ms)),
  { title: 'Version', cell: ({ build }) => build },
  numberColumn('Uptime', ({ age_s: s }) => duration(s * 1e6)),
  numberColumn('Age', ({ published_s_ago: s }) => duration(s * 1e6)),
];

const QUOTA_FIGURES = [['Streams', 'streams'], ['Buckets', 'buckets'], ['Keys', 'keys'], ['Keys without a store', 'failed_keys'], ['Hits held', 'held_hits'], ['Hits of proxies', 'assigned_hits'], ['Held for, s', 'held_for_s']];

export function fleet(main, { alarms, hasAlarms }) {
  const wrong = element('div');
  const top = element('div');
  const chart = hourChart('Requests of this replica, the last hour', 'requests a minute');
  const body = element('div');
  main.append(heading('Fleet'), wrong, top, body, chart.node);
  const refresh = async () => {
    hasAlarms.then(() => update(wrong, alarmList(alarms())));
    const [report, history] = await Promise.all([
      getJson(withQuery('fleet', { minutes: 10, most: 20 })),
      getJson('history'),
    ]);
    return () => draw(report, history);
  };
  const draw = (report, history) => {
    const silent = report.replicas.filter((one) => one.silent).length;
    const { recent, findings } = report;
    update(top, report.problem ? notice(`This replica only: ${report.problem}.`) : null,
      report.left_out.map(({ summaries, reason }) => notice(`Left out: ${number(summaries)} summaries ${reason}.`)),
      element('h2', {}, 'Requests'),
      grid(...requestFigures(recent),
        card('Replicas', element('p', { class: 'figure' }, number(report.replicas.length - silent), silent > 0 ? element('small', { class: 'bad' }, ` and ${number(silent)} silent`) : null))),
      element('h2', {}, 'Limits'),
      grid(decisionsOf('Decisions of limits; a request may have several', recent)));
    const quotas = report.replicas.filter((one) => one.quota?.streams > 0 || one.quota?.keys > 0);
    const rows = [...report.replicas].sort((a, b) => problemsOf(b, findings) - problemsOf(a, findings));
    update(body,
      box(table('Replicas, problems first', replicaColumns(findings), rows,
        { key: (one) => one.incarnation, open: (one) => { location.hash = replicaAddress(one); } })),
      quotas.length > 0 ? box(table('Hits held for proxies over quota streams', [replicaColumns(findings)[0],
        ...QUOTA_FIGURES.map(([title, field]) => numberColumn(title, ({ quota: of }) => number(of[field])))], quotas, { key: (one) => one.incarnation })) : null,
      report.blocked_values > 0 ? box(table('Blocked values', [
        nameColumn('Domain', ({ domain }) => printable(domain)),
        nameColumn('Key', ({ key }) => printable(key)),
        { title: 'Until', cell: (block) => timeOf(block.until) },
        nameColumn('Reason', ({ reason }) => printable(reason)),
      ], report.blocks), soft(`${number(report.blocked_values)} in all; the values need the admin token.`),
        button('List blocked values', listBlocks)) : null,
      box(rejectedTable('Keys rejected most in ten minutes, all replicas', report.top.overall)));
    chart.update(requestSeries(history));
  };
  return { refresh, every: 5 };
}

export function replica(main, context) {
  const { argument } = readAddress();
  return argument ? otherReplica(main, argument) : thisReplica(main, context);
}

function otherReplica(main, incarnation) {
  const body = element('div');
  main.append(para(link('#/fleet', '← All replicas')), body);
  const draw = (report) => {
    const found = report.replicas.find((one) => one.incarnation === incarnation);
    if (!found) {
      update(body, heading('Replica'), problemNotice('This replica has stopped.'));
      return;
    }
    const { recent, rules, store } = found;
    const findings = report.findings.filter(({ replicas }) => replicas.includes(found.name));
    const command = `kubectl port-forward ${quoteForShell(`pod/${found.name}`)} 6071:6070`;
    update(body, heading('Replica ', span('mono', printable(found.name))),
      found.silent ? problemNotice(`Silent for ${number(found.published_s_ago)} s: the figures are of then.`) : null,
      findings.map(({ text }) => element('p', { class: 'notice bad' }, printable(text))),
      grid(...requestFigures(recent)), grid(decisionsOf('Decisions of limits', recent)),
      grid(
        card('Store', details([['State', storeState(found)], ['Servers', number(store.servers)]])),
        card('Rules', details([['Hash', code(rules.hash || 'none')], ['Version', rules.version ?? '–'], ['Rules', number(rules.rules)], ['Last reload', rules.load_failed ? span('bad', 'failed') : 'worked']])),
        found.quota ? card('Quota streams', details(QUOTA_FIGURES.map(([title, field]) => [title, number(found.quota[field])]))) : null,
        card('Process', details([['Version', found.build], ['Uptime', duration(found.age_s * 1e6)], ['Place', number(found.slot)], ['Clock', `${clockOf(found.clock_offset_ms)} of Redis`], ['Id', code(found.incarnation)], ['Published', `${number(found.published_s_ago)} s ago`]]))),
      card('Its own console', para('History, failures and settings are with the replica itself. In Kubernetes:'), pre('Command', command), tools(copyButton('Copy command', command))));
  };
  return {
    every: 5,
    refresh: async () => {
      const report = await getJson('fleet?minutes=10&most=1');
      return () => draw(report);
    },
  };
}

function thisReplica(main, { live, alarms }) {
  const figures = element('div');
  const state = grid();
  const chart = hourChart('The last hour', 'requests a minute');
  main.append(heading('This replica'), figures, chart.node, state);
  const draw = () => {
    const { last } = live;
    if (!last) {
      update(figures, alarmList(alarms()), soft('Waiting for the first figures.'));
      return;
    }
    const requests = live.points.map(({ recent }) => recent.calls_per_s);
    const rejected = live.points.map(({ recent }) => recent.rejected_per_s);
    const { latency_us: bounds } = last.recent;
    const time = duration(live.points.reduce((sum, point) => sum + point.interval_us, 0));
    const highest = (list) => soft(`${time}, highest ${rate(Math.max(...list))}`);
    const latency = live.points.map(({ recent }) => recent.latency_us?.p99 ?? 0);
    update(figures, alarmList(alarms()),
      element('h2', {}, 'Requests'),
      grid(
        figure('Requests', rate(requests.at(-1)), 'per second', sparkline(requests, 'requests', `Requests per second in the last ${time}`), highest(requests)),
        figure('Rejected requests', rate(rejected.at(-1)), 'per second', sparkline(rejected, 'rejected', `Rejected requests per second in the last ${time}`), highest(rejected)),
        figure('Latency of decisions, p99', duration(bounds?.p99), 'at most', sparkline(latency, 'latency', '99th percentile of latency'),
          soft(`p50 ${atMost(bounds?.p50)} · p90 ${atMost(bounds?.p90)} · p99.9 ${atMost(bounds?.p999)}`))),
      element('h2', {}, 'Limits'),
      grid(decisionsOf('Decisions of limits; a request may have several', last.recent)));
    const { store, rules, replicas } = last;
    update(state,
      card('This process', element('p', { class: last.ready ? 'good' : 'bad' }, last.ready ? 'ready' : `not ready: ${last.not_ready_reason}`),
        last.draining && element('p', { class: 'warn' }, 'stopping')),
      card('Store', element('p', { class: store.available ? 'good' : 'bad' }, `${store.kind}: ${store.available ? 'available' : 'lost'}`),
        details([['Servers', number(store.servers)], ['Connections', number(store.connections)], ['Servers not used', number(store.available ? store.breakers_open : store.servers)], ['Failed charges per second', rate(last.recent.failed_charges_per_s)]])),
      card('Rules', element('p', { class: rules.load_failed ? 'bad' : 'good' }, rules.load_failed ? 'the last reload failed' : 'loaded'),
        details([['Version', rules.version ?? rules.load_number], ['Loaded', rules.loaded_at_us ? timeOf(rules.loaded_at_us / 1000) : '–'], ['Domains', number(rules.domains)], ['Limits', number(rules.limits)]])),
      card('Replicas', para(replicas ? `${number(replicas.live)} live` : 'counted with Redis only'),
        replicas && details([['Slot', replicas.slot ?? 'none']]), para(link('#/fleet', 'All replicas'))));
  };
  return {
    onLive: draw,
    every: 5,
    refresh: async () => {
      draw();
      const history = await getJson('history');
      return () => chart.update(requestSeries(history));
    },
  };
}

function counts(title, of) {
  const rows = Object.entries(of ?? {});
  return card(title, rows.length === 0 ? element('p', { class: 'good' }, 'none since the start') : details(rows.map(([name, count]) => [name.replaceAll('_', ' '), number(count)])));
}

export function failures(main) {
  const body = element('div');
  main.append(heading('Failures'), body);
  const refresh = async () => {
    const [status, problems] = await Promise.all([getJson('rlconfig/status'), getJson('problems')]);
    const servers = problems.servers ?? [];
    const log = [...(problems.log ?? [])].reverse();
    return () => update(body,
      grid(
        counts('Failed charges', problems.failed_charges),
        counts('Decided by failure policy', problems.decided_by_policy),
        card('Servers of the store', servers.length === 0 ? soft('none') : details(servers.map((server) => [server.address, serverState(server, problems.store_available)])))),
      status.last_error && card(status.xds?.partly_applied_version ? 'Some domains were refused and keep their last rules; the others are in force' : 'The last reload failed; the rules before it are in force',
        pre('Errors', status.last_error), (problems.diagnostics ?? []).map(diagnostic)),
      box(log.length === 0 ? soft('No warning or error was logged.') : table('Last warnings and errors of the log', [
        { title: 'Time, UTC', cell: (line) => timeOf(line.time) },
        { title: 'Level', cell: ({ level }) => span(/error/i.test(level) ? 'bad' : 'warn', level.toLowerCase()) },
        nameColumn('Message', (line) => [line.message, line.times > 1 ? badge(`${number(line.times)} times`) : null, fields(line.fields)]),
      ], log)));
  };
  return { refresh, every: 5 };
}

function serverState(server, isStoreAvailable) {
  const state = server.is_breaker_open ? span('bad', 'not used: breaker open') : isStoreAvailable ? span('good', 'in use') : span('bad', 'not reached');
  return [state, server.answer_ms && ` in ${server.answer_ms} ms`, server.last_error && `; ${server.last_error_s} s ago: ${server.last_error}`];
}

function fields(of) {
  const pairs = Object.entries(of ?? {});
  return pairs.length === 0 ? null : span('mono soft', ` ${pairs.map(([name, value]) => `${name}=${value}`).join(' ')}`);
}

function diagnostic(found) {
  const lines = (found.lines ?? []).map(({ number: at, text }) => {
    const line = `${String(at).padStart(5)}  ${text}\n`;
    return at === found.line ? element('mark', {}, line) : line;
  });
  return element('div', {}, element('p', { class: 'mono' }, found.message ?? ''), lines.length > 0 ? pre(found.message, lines) : null);
}

const secondsAgo = (seconds) => `${number(seconds)} s ago`;

const streamColumns = [
  { title: 'Stream', cell: (stream) => stream.stream },
  nameColumn('Proxy', (stream) => printable(stream.peer) || 'Unix socket'),
  nameColumn('Domain', (stream) => printable(stream.domain)),
  countColumn('Buckets', 'buckets'),
  countColumn('Reports', 'reports'),
  // Two reports are missing then.
  numberColumn('Last report', ({ reported_s: ago }) => (ago > 11 ? span('bad', secondsAgo(ago)) : secondsAgo(ago))),
  numberColumn('Open for', (stream) => duration(stream.open_s * 1e6)),
];

export function quota(main) {
  const rule = searchInput('rule', 'shop.user');
  const body = element('div');
  main.append(heading('Quotas'), soft('Streams of the rate limit quota service, and which proxy holds how much of a key until when.'),
    tools(label('Rule', rule)), body);
  let isOn = null;
  const draw = (report) => update(body,
    grid(figure('Streams', number(report.stream_count), 'open'), figure('Buckets', number(report.bucket_count), 'of all streams'), figure('Keys', number(report.key_count), 'divided')),
    box(table(`${number(report.streams.length)} of ${number(report.stream_count)} streams, the oldest first`, streamColumns, report.streams, { key: (stream) => stream.stream })),
    report.keys.map((key) => card([keyLink(key), ' of ', code(printable(key.rule))], sharesOf(key.key, key))));
  const refresh = async () => {
    isOn ??= (await getJson('settings')).some(({ name, value }) => name === 'TOLLKEEPER_RLQS' && value === 'true');
    const report = isOn && await getJson(withQuery('quota', { most: 20, rule: rule.value.trim() }));
    return () => (isOn ? draw(report) : update(body, notice('The rate limit quota service is off: set TOLLKEEPER_RLQS=true and restart.')));
  };
  const change = () => {
    writeState({ rule: rule.value.trim() });
    return refresh();
  };
  return { refresh, every: 5, change: [[rule, change]] };
}

export function settings(main) {
  const { state } = readAddress();
  const filter = searchInput('filter', 'name or value');
  const only = element('input', { type: 'checkbox', id: 'only-set', checked: state.has('set') });
  const body = element('div');
  const level = select('level', ['panic', 'fatal', 'error', 'warn', 'info', 'debug', 'trace'].map((name) => [name, name]));
  let current = null;
  const showLevel = async () => {
    const now = (await request('log_level')).trim();
    if (now !== current) level.value = now;
    current = now;
  };
  main.append(heading('Settings'),
    tools(label('Log level', level), button('Change', () => changeLevel(level.value, showLevel))),
    tools(label('Filter', filter), label(only, 'set by the environment only')), body);
  let all = [];
  const draw = () => {
    const text = filter.value.toLowerCase();
    const shown = all.filter((setting) => (!only.checked || setting.set) && `${setting.name} ${setting.value}`.toLowerCase().includes(text));
    update(body, box(table(`${number(shown.length)} of ${number(all.length)} settings`, [
      nameColumn('Name', ({ name }) => code(name)),
      nameColumn('Value', ({ value }) => (value === '' ? span('soft', 'empty') : span('mono', value))),
      { title: 'Origin', cell: (setting) => (setting.set ? 'environment' : span('soft', 'default')) },
    ], shown, { key: (setting) => setting.name })));
  };
  const change = async () => {
    writeState({ filter: filter.value, set: only.checked && 1 });
    draw();
  };
  return {
    every: 30,
    change: [filter, only].map((control) => [control, change]),
    refresh: async () => {
      await showLevel();
      all = await getJson('settings');
      return draw;
    },
  };
}

async function changeLevel(level, then) {
  const confirmed = await ask({
    title: 'Change the log level?',
    body: [para(`This process logs from ${level} on, until it ends. At debug each decision is a line.`)],
    confirm: 'Change',
  });
  if (!confirmed) return;
  try {
    if ((await adminRequest('log_level', { method: 'PUT', body: level })) !== null) await then();
  } catch (error) {
    await tell('Not changed', problemNotice(error.message));
  }
}
