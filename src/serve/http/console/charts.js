// Charts: the last seconds as a line, and the last hour as columns with axes, values and marks.

import { atMost, clock, element, number, numberColumn, printable, share, span, svg, table, update } from './dom.js';

const MINUTES = 60;
const HEIGHT = 190;
const BOX = { left: 52, right: 12, top: 16, bottom: 24 };

export function sparkline(values, kind, label) {
  const top = Math.max(...values, 1e-9);
  const step = values.length > 1 ? 300 / (values.length - 1) : 0;
  const points = values.map((value, index) => `${(index * step).toFixed(1)},${(40 - (36 * value) / top).toFixed(1)}`);
  const path = points.length > 0 ? `M${points.join('L')}` : '';
  return svg(
    'svg',
    { class: `spark ${kind}`, viewBox: '0 0 300 42', preserveAspectRatio: 'none', role: 'img', 'aria-label': label },
    svg('path', { class: 'area', d: path ? `${path}L${((values.length - 1) * step).toFixed(1)},42L0,42Z` : '' }),
    svg('path', { class: 'line', d: path }),
  );
}

/** A share of each kind of decision, as a bar. */
export function mix(parts) {
  const total = parts.reduce((sum, { count }) => sum + count, 0);
  const bar = element('div', { class: 'mix', 'aria-hidden': 'true' });
  for (const { kind, count } of parts.filter((part) => part.count > 0)) {
    const part = span(kind);
    part.style.width = `${(100 * count) / total}%`;
    bar.append(part);
  }
  return bar;
}

/** The smallest of 1, 2, 5, 10 and so on that is not below a count, and even, so that its half is whole. */
function niceTop(count) {
  for (let power = 1; ; power *= 10) {
    for (const step of [2, 4, 10]) if (step * power >= count) return step * power;
  }
}

/**
 * The last hour by minute. `series` are `{ title, kind, values }`, stacked in their order; `lines` are the same as
 * lines; `read` makes the text of a minute. The chart keeps its place, and the minute that is read, over updates.
 */
export function hourChart(title, unit) {
  const plot = element('div', { class: 'plot', tabindex: 0, role: 'group' });
  const readout = element('p', { class: 'readout', role: 'status' });
  const legend = element('p', { class: 'legend' });
  const values = element('details', { 'data-own': '' }, element('summary', {}, 'Values'), element('div'));
  const node = element('section', { class: 'card', 'data-own': '' }, element('h2', {}, title), legend, plot, readout, values);
  let data = null;
  let chosen = null;

  const draw = () => {
    const { start_s: starts, series, lines = [], loads } = data;
    const width = Math.max(plot.clientWidth, 280);
    const last = starts.at(-1);
    const first = last - (MINUTES - 1) * 60;
    const wide = (width - BOX.left - BOX.right) / MINUTES;
    const inner = HEIGHT - BOX.top - BOX.bottom;
    const x = (seconds) => BOX.left + ((seconds - first) / 60) * wide;
    const sums = starts.map((_, at) => series.reduce((sum, { values: of }) => sum + of[at], 0));
    const top = niceTop(Math.max(1, ...starts.flatMap((start, at) => (start < first ? [] : [sums[at], ...lines.map(({ values: of }) => of[at])]))));
    const y = (count) => BOX.top + inner - (inner * count) / top;
    const parts = [0, top / 2, top].flatMap((tick) => [
      line('rule', BOX.left, y(tick), width - BOX.right, y(tick)),
      text(number(tick), { x: BOX.left - 6, y: y(tick) + 4, 'text-anchor': 'end' }),
    ]);
    for (let at = first - (first % 600) + (first % 600 ? 600 : 0); at <= last; at += width < 480 ? 1200 : 600) {
      parts.push(line('rule', x(at), BOX.top + inner, x(at), BOX.top + inner + 4));
      parts.push(text(clock(at), { x: x(at), y: HEIGHT - 6, 'text-anchor': x(at) < BOX.left + 14 ? 'start' : x(at) > width - 28 ? 'end' : 'middle' }));
    }
    starts.forEach((start, at) => {
      if (start < first) return;
      const after = at > 0 ? Math.max(starts[at - 1] + 60, first) : start;
      if (after < start) parts.push(svg('rect', { class: 'gap', x: x(after), y: BOX.top, width: x(start) - x(after), height: inner }));
      let below = 0;
      for (const { kind, values: of } of series) {
        if (of[at] > 0) {
          const bar = { x: (x(start) + wide * 0.1).toFixed(1), y: y(below + of[at]).toFixed(1), width: (wide * 0.8).toFixed(1), height: Math.max(y(below) - y(below + of[at]), 1).toFixed(1) };
          parts.push(svg('rect', { class: kind, ...bar }));
        }
        below += of[at];
      }
      for (const { kind, values: of } of lines) {
        if (of[at] > 0) parts.push(svg('rect', { class: kind, x: x(start).toFixed(1), y: (y(of[at]) - 1).toFixed(1), width: wide.toFixed(1), height: 2 }));
      }
    });
    for (const { at_s: at, version } of loads.filter((load) => load.at_s >= first)) {
      const kind = version === null ? 'mark failed' : 'mark';
      parts.push(line(kind, x(at), BOX.top - 2, x(at), BOX.top + inner));
      parts.push(svg('path', { class: kind, d: `M${x(at) - 5},${BOX.top - 10}h10l-5,8z` }));
    }
    if (starts[0] > first && x(starts[0]) - BOX.left > 130) parts.push(text('not recorded', { x: BOX.left + 8, y: BOX.top + 14 }));
    if (chosen !== null && chosen >= first) parts.push(line('cursor', x(chosen + 30), BOX.top, x(chosen + 30), BOX.top + inner));
    const find = (event) => {
      const seconds = first + Math.floor((event.clientX - plot.getBoundingClientRect().left - BOX.left) / wide) * 60;
      choose(starts.reduce((best, start) => (Math.abs(start - seconds) < Math.abs(best - seconds) ? start : best), last));
    };
    plot.setAttribute('aria-label', `${title}, ${unit}, ${clock(Math.max(first, starts[0]))} to ${clock(last)} UTC. Arrow keys read minutes.`);
    plot.onpointermove = find;
    plot.onpointerleave = () => document.activeElement !== plot && choose(null);
    update(plot, svg('svg', { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, 'aria-hidden': 'true' }, ...parts));
    const legends = [...series, ...lines].map(({ title: name, kind }) => element('span', {}, span(`sample ${kind}`), name));
    update(legend, ...legends, loads.length > 0 && element('span', {}, span('sample mark'), 'rules loaded'),
      starts.some((start, at) => at > 0 && start - starts[at - 1] > 60) && element('span', {}, span('sample gap'), 'not recorded'),
      span('soft', `${unit} · UTC · the last minute still runs`));
    readMinute();
    if (values.open) drawValues();
  };

  const readMinute = () => {
    const { start_s: starts, loads } = data;
    const at = chosen === null ? -1 : starts.indexOf(chosen);
    if (at < 0) {
      const sum = (of) => of.reduce((total, count) => total + count, 0);
      update(readout, `${clock(starts[0])} to ${clock(data.now_s)}: ${describe((of) => sum(of))}. Point at a minute for its values.`);
      return;
    }
    const marks = loads.filter((load) => load.at_s >= chosen && load.at_s < chosen + 60).map((load) =>
      ` · ${clock(load.at_s, true)} ${load.version === null ? 'rules refused' : `rules version ${load.version} loaded`}`);
    update(readout, `${clock(chosen)}: ${describe((of) => of[at])}${data.extra?.(at) ?? ''}${marks.join('')}`);
  };

  const describe = (pick) => {
    const all = data.series.reduce((sum, { values: of }) => sum + pick(of), 0);
    const parts = data.series.map(({ title: name, values: of }) => `${name} ${number(pick(of))} (${share(pick(of), all)})`);
    return [...parts, ...(data.lines ?? []).map(({ title: name, values: of }) => `${name} ${number(pick(of))}`)].join(', ');
  };

  const drawValues = () => {
    const columns = [{ title: 'Minute, UTC', cell: (at) => clock(data.start_s[at]) },
      ...[...data.series, ...(data.lines ?? [])].map(({ title: name, values: of }) => numberColumn(name, (at) => number(of[at])))];
    update(values.lastElementChild, table(`${printable(title)} by minute`, columns, data.start_s.map((_, at) => at).reverse()));
  };
  values.addEventListener('toggle', () => data && values.open && drawValues());

  const choose = (start) => {
    if (start === chosen || !data) return;
    chosen = start;
    draw();
  };
  plot.onkeydown = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !data) return;
    event.preventDefault();
    const at = chosen === null ? data.start_s.length - (step > 0 ? 1 : 0) : data.start_s.indexOf(chosen);
    choose(data.start_s[Math.min(Math.max(at + step, 0), data.start_s.length - 1)]);
  };
  return {
    node,
    update: (next) => {
      data = next;
      draw();
    },
  };
}

const line = (kind, x1, y1, x2, y2) => svg('line', { class: kind, x1, y1, x2, y2 });

function text(content, attributes) {
  return svg('text', attributes, document.createTextNode(content));
}

/** Data of a chart from a report about limits. A limit in shadow mode has a line of what it would reject. */
export function limitSeries(report) {
  const { passed, rejected, matched, exceeded_in_shadow: shadow } = report.limits;
  const other = matched.map((count, at) => Math.max(count - passed[at] - rejected[at], 0));
  const series = [{ title: 'passed', kind: 'passed', values: passed }, { title: 'rejected', kind: 'rejected', values: rejected }];
  if (other.some((count) => count > 0)) series.push({ title: 'error', kind: 'other', values: other });
  const lines = shadow.some((count) => count > 0) ? [{ title: 'of these over the limit in shadow mode', kind: 'shadow', values: shadow }] : [];
  return { ...report, series, lines };
}

/** Data of a chart from a report about requests. */
export function requestSeries(report) {
  const { requests, rejected, failed_charges: failed, p99_at_most_us: p99 } = report.requests;
  const passed = requests.map((count, at) => Math.max(count - rejected[at], 0));
  const extra = (at) => ` · p99 ${requests[at] > 0 && p99[at] === null ? 'above the last bound' : atMost(p99[at])}${failed[at] > 0 ? ` · ${number(failed[at])} charges failed in the store` : ''}`;
  const lines = failed.some((count) => count > 0) ? [{ title: 'charges that failed in the store', kind: 'shadow', values: failed }] : [];
  return { ...report, series: [{ title: 'not rejected', kind: 'passed', values: passed }, { title: 'rejected', kind: 'rejected', values: rejected }], lines, extra };
}
