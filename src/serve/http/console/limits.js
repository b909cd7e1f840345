// Views of limits: all of them, and one with its history, its keys, and what another limit would do.

import { badge, box, button, card, clock, code, copyButton, copyLink, countColumn, curlOf, details, duration, element, heading, label, link, modeBadge, nameColumn, notice, number, numberColumn, para, pre, printable, problemNotice, select, share, soft, span, table, timeOf, tools, update } from './dom.js';
import { hourChart, limitSeries } from './charts.js';
import { busiestTable, keyLink, rejectedTable, ruleLink, ruleYaml, verdict } from './keys.js';
import { adminRequest, getJson, readAddress, searchInput, tell, withQuery, writeState } from './server.js';

const LIMITS_PER_PAGE = 100;
const ORDERS = [['recent', 'rejected most in ten minutes'], ['rejected', 'rejected most'], ['share', 'largest share rejected'], ['matched', 'matched most'], ['near', 'nearest to the limit'], ['keys', 'most keys'], ['name', 'name'], ['file', 'place in the files']];

const limitColumns = [
  nameColumn('Limit', (limit) => [ruleLink(limit.rule), modeBadge(limit), element('br'), span('soft', limit.limit)]),
  countColumn('Ten minutes', 'recently_matched'),
  countColumn('Rejected', 'recently_rejected'),
  countColumn('Matched', 'matched'),
  countColumn('Rejected', 'rejected'),
  numberColumn('Share', (limit) => share(limit.rejected, limit.matched)),
  countColumn('Near', 'near_limit_hits'),
  countColumn('Keys', 'distinct_keys'),
];

export function rules(main, { load }) {
  const { argument, state } = readAddress();
  return argument ? ruleDetails(main, argument) : allRules(main, state, load);
}

const lastLoad = ({ loaded_at, id, changes }) => card('Last load',
  para(timeOf(loaded_at), ' UTC, set ', code(id), changes && `; limits: ${changes.changed} changed, ${changes.added} added, ${changes.removed} removed`),
  changes?.limits.length > 0 && pre('Changes', changes.limits.map(printable).join('\n')));

function allRules(main, state, load) {
  const search = searchInput('search', 'domain, key, value, file');
  const order = select('order', ORDERS, state.get('order') ?? 'recent');
  const rejecting = element('input', { type: 'checkbox', id: 'rejecting', checked: state.has('rejecting') });
  const found = element('input', { type: 'checkbox', id: 'only-findings', checked: state.has('found') });
  const body = element('div');
  let offset = Math.max(Number.parseInt(state.get('offset') ?? '0', 10) || 0, 0);
  const query = () => ({ order: order.value, most: LIMITS_PER_PAGE, offset: offset || '', search: search.value.trim(), rejecting: rejecting.checked, found: found.checked });
  main.append(
    heading('Rules'),
    tools(label('Search', search), label('Order', order), label(rejecting, 'that rejected'), label(found, 'with findings'),
      copyLink(), copyButton('Copy curl', () => curlOf(withQuery('rules', { ...query(), format: 'text' })))),
    body);
  const draw = (report, status) => {
    const last = offset + report.rules.length;
    const text = report.rules.length > 0 ? `${number(offset + 1)} to ${number(last)} of ${number(report.limits)} limits` : '';
    const turn = (name, to, enabled) => element('button', { type: 'button', id: `page-${name}`, disabled: !enabled, onclick: () => load(() => page(to)) }, name);
    const turns = tools(span('soft', text),
      turn('previous', offset - LIMITS_PER_PAGE, offset > 0), turn('next', offset + LIMITS_PER_PAGE, last < report.limits));
    const columns = [...limitColumns,
      { title: 'Position', cell: (limit) => span('mono soft', printable(limit.origin)) },
      { title: 'Findings', cell: (limit) => limit.findings.map((finding) => badge(finding.kind.replaceAll('_', ' '), 'warn', finding.advice)) },
    ];
    const options = { key: (limit) => limit.rule, rowClass: (limit) => (limit.candidate && order.value === 'file' ? 'child' : undefined) };
    update(body, turns, report.rules.length === 0 ? soft('No limit matches the search.')
      : box(table('Decisions of ten minutes, and since the load', columns, report.rules, options)), lastLoad(status));
  };
  const refresh = async () => {
    const [report, status] = await Promise.all([getJson(withQuery('rules', query())), getJson('rlconfig/status')]);
    // The last page may be gone.
    if (report.rules.length === 0 && offset > 0) return () => load(() => page(Math.floor(Math.max(report.limits - 1, 0) / LIMITS_PER_PAGE) * LIMITS_PER_PAGE));
    return () => draw(report, status);
  };
  const page = (to) => {
    offset = Math.max(to, 0);
    writeState({ search: search.value.trim(), order: order.value === 'recent' ? '' : order.value, rejecting: rejecting.checked && 1, found: found.checked && 1, offset: offset || '' });
    return refresh();
  };
  return { refresh, every: 5, change: [search, order, rejecting, found].map((control) => [control, () => page(0)]) };
}

function ruleDetails(main, name) {
  const facts = element('div');
  const chart = hourChart('The last hour', 'decisions a minute');
  const rest = element('div');
  main.append(para(link('#/rules', '← All rules')), element('h1', { class: 'mono' }, printable(name)), facts, chart.node, rest);
  const refresh = async () => {
    const [report, top, history] = await Promise.all([
      getJson(withQuery('rules', { rule: name, exact: true })),
      getJson(withQuery('top', { rule: name, exact: true, minutes: 10, most: 20 })).catch((error) => error),
      getJson(withQuery('history', { rule: name, exact: true })),
    ]);
    const limit = report.rules[0];
    const text = limit && await getJson(withQuery('rule_text', { origin: limit.origin })).catch(() => null);
    const names = text?.limits.length > 1 ? text.limits.slice(0, 20) : [];
    const siblings = await Promise.all(names.map(({ rule }) => getJson(withQuery('rules', { rule, exact: true }))));
    return () => draw({ limit, top, history, text, siblings: siblings.flatMap((of) => of.rules) });
  };
  const draw = ({ limit, top, history, text, siblings }) => {
    chart.node.hidden = !limit;
    if (!limit) {
      update(facts, problemNotice('No limit of the loaded rules has this name.'));
      update(rest);
      return;
    }
    chart.update(limitSeries(history));
    update(facts,
      box(details([
        ['Limit', [limit.limit, modeBadge(limit)]],
        ['Position', code(printable(limit.origin))],
        ['Counting for', duration(limit.age_s * 1e6)],
        ['Decisions', `${number(limit.matched)} matched, ${number(limit.rejected)} rejected (${share(limit.rejected, limit.matched)})${limit.shadow_mode ? ' in shadow mode' : ''}, ${number(limit.near_limit_hits)} hits near the limit`],
        ['Distinct keys', `about ${number(limit.distinct_keys)}, of them about ${number(limit.distinct_rejected_keys)} rejected`],
        limit.quota && ['Quotas', [`${number(limit.quota.keys)} keys in ${number(limit.quota.proxies)} parts at proxies, the last ends in ${number(limit.quota.ends_s)} s `,
          link(`#/quota?${new URLSearchParams({ rule: limit.rule_path })}`, 'Show')]],
        limit.slots && ['Slots', `${number(limit.slots.taken)} taken, ${number(limit.slots.freed)} freed, ${number(limit.slots.expired_seats)} never released`],
      ]),
      tools(copyLink(), copyButton('Copy curl', () => curlOf(withQuery('rules', { rule: name, exact: true }))),
        text?.yaml ? copyButton('Copy YAML', () => text.yaml) : null)),
      limit.findings.map((finding) => notice(element('strong', {}, finding.kind.replaceAll('_', ' ')), `: ${finding.advice}`)),
      text?.yaml ? card('The rule, as it was loaded', ruleYaml(text)) : null,
      siblings.length > 1 ? box(table('Limits of the same rule', limitColumns.slice(0, 6), siblings, { key: (row) => row.rule })) : null);
    const parts = top instanceof Error ? [problemNotice(top.message)] : [
      box(rejectedTable('Keys rejected most in ten minutes', top.overall, false)),
      box(busiestTable('Busiest keys of ten minutes, from a sample', top.busiest, false))];
    update(rest, parts, card('Counters',
      soft('Lists up to 100 counters of the rule. Needs the admin token and is written to the audit log.'),
      button('List counters', () => listCounters(limit))));
  };
  return { refresh, every: 5 };
}

async function listCounters(limit) {
  try {
    const text = await adminRequest(withQuery('counters', { domain: limit.domain, rule: limit.rule_path }));
    if (text === null) return;
    const listing = JSON.parse(text);
    const rows = listing.counters.flatMap((counter) => counter.limits.map((of) => ({ entries: counter.entries.map(([key, value]) => ({ key, value })), counter: of })));
    const name = (entries) => entries.map(({ key, value }) => `${key}=${value ?? ''}`).join(', ');
    await tell('Counters',
      soft(`${listing.note}${listing.complete ? '' : '; there may be others'}`),
      rows.length === 0 ? soft('No counter is above zero.') : table('Counters', [
        nameColumn('Key', ({ entries }) => keyLink({ domain: limit.domain, entries, key: name(entries) })),
        numberColumn('Used', ({ counter }) => number(counter.used)),
        numberColumn('Left', ({ counter }) => number(counter.remaining)),
        { title: 'Says', cell: ({ counter }) => verdict(counter) },
      ], rows));
  } catch (error) {
    await tell('Counters', problemNotice(error.message));
  }
}

