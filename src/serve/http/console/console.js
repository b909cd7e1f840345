// The console of the debug listener: its header, the clock, the live figures, and the choice of the view.

import { byId, element, heading, problemNotice } from './console/dom.js';
import { failures, fleet, quota, replica, settings } from './console/fleet.js';
import { key, keys, sandbox } from './console/keys.js';
import { rules } from './console/limits.js';
import { askForToken, forgetToken, getJson, hasToken, readAddress, showToken } from './console/server.js';

const MAX_POINTS = 120;
const THEME = 'tollkeeper-theme';
const ALARM_INTERVAL_MS = 5000;
const TYPING_MS = 250;

// Live figures of this replica.

const live = { last: null, at: null, points: [], source: null, silence: '' };

/** Points before and after a gap are not joined. */
const clearPoints = () => Object.assign(live, { last: null, at: null, points: [] });

/** Asks why there are no events; a browser does not tell, and lets no more than six connections to a server wait. */
async function explainSilence() {
  const controller = new AbortController();
  const timer = setTimeout(() => controller.abort(), 5000);
  try {
    const response = await fetch('live', { cache: 'no-store', credentials: 'omit', signal: controller.signal });
    live.silence = response.ok ? '' : `no live figures: ${(await response.text()).trim()}`;
  } catch {
    live.silence = 'no live figures: the server does not answer, or other consoles hold all connections';
  } finally {
    clearTimeout(timer);
    controller.abort();
    showClock();
  }
}

function connect() {
  if (live.source || document.hidden) return;
  const source = new EventSource('live');
  live.source = source;
  clearPoints();
  const silence = setTimeout(() => live.source === source && explainSilence(), 5000);
  source.onopen = clearPoints;
  source.onmessage = (event) => {
    clearTimeout(silence);
    live.silence = '';
    live.last = JSON.parse(event.data);
    live.at = Date.now();
    live.points.push(live.last);
    if (live.points.length > MAX_POINTS) live.points.shift();
    if (current.view?.onLive) {
      current.view.onLive();
      noteUpdate(live.at);
    }
  };
  source.onerror = () => {
    clearTimeout(silence);
    live.silence = 'disconnected, retrying';
    showClock();
    if (source.readyState === EventSource.CLOSED) {
      live.source = null;
      explainSilence();
      setTimeout(connect, 3000);
    }
  };
}

// The clock: how old what is shown is. It runs whatever the server does.

let updatedAt = null;

function noteUpdate(at) {
  updatedAt = at;
  showClock();
}

function showClock() {
  const shown = byId('connection');
  const age = updatedAt === null ? null : Math.floor((Date.now() - updatedAt) / 1000);
  const isOld = age !== null && age > 2 * (current.view?.every ?? 5) + 3;
  let text = 'loading';
  if (age !== null) text = age < 1 ? 'updated now' : `updated ${age < 120 ? `${age} s` : `${Math.floor(age / 60)} min`} ago`;
  if (document.hidden) text = 'paused while hidden';
  if (live.silence) text = `${live.silence} · ${text}`;
  shown.dataset.state = isOld ? 'old' : live.silence ? 'lost' : age === null ? '' : 'live';
  if (shown.textContent !== text) shown.textContent = text;
  byId('main').classList.toggle('old', isOld);
  // Said once, not every second.
  const said = isOld ? 'What is shown is old.' : live.silence;
  if (byId('said').textContent !== said) byId('said').textContent = said;
}

setInterval(showClock, 1000);

// Alarms, in every header.

/** `null`: they could not be loaded. */
let alarms;
let isLoadingAlarms = false;

async function loadAlarms() {
  if (document.hidden || isLoadingAlarms) return;
  isLoadingAlarms = true;
  alarms = await getJson('alarms').catch(() => null);
  isLoadingAlarms = false;
  const link = byId('alarms');
  const count = alarms?.alarms.length;
  link.textContent = !alarms ? 'alarms not known' : count === 0 ? 'no alarm' : count === 1 ? '1 alarm' : `${count} alarms`;
  link.className = !alarms ? 'warn' : count === 0 ? 'good' : 'bad';
  showTitle();
  if (!alarms) return;
  byId('replica').textContent = `${alarms.version} · ${alarms.replica}`;
  byId('replica').title = alarms.replica;
}

function showTitle() {
  const count = alarms?.alarms.length;
  document.title = `${count > 0 ? `(${count}) ` : ''}${current.name} · tollkeeper`;
}

setInterval(loadAlarms, ALARM_INTERVAL_MS);

// Choice of the view.

const VIEWS = { fleet, replica, rules, keys, key, sandbox, failures, quota, settings };
// Addresses of earlier versions.
const MOVED = { overview: 'replica', explain: 'sandbox' };
let current = { view: null, name: '', timer: null };

let loads = 0;

/** Calls the function that `work` resolves to, which draws, unless a later load has begun. */
async function load(work) {
  const { view } = current;
  loads += 1;
  const own = loads;
  const isLast = () => own === loads && view === current.view;
  const shown = byId('load-error');
  try {
    const draw = await work();
    if (!isLast()) return;
    draw?.();
    noteUpdate(view.onLive ? live.at : Date.now());
    shown.textContent = '';
  } catch (error) {
    if (isLast()) shown.textContent = error.message;
  }
}

function openView(main, name) {
  const context = { live, alarms: () => alarms, hasAlarms, load };
  try {
    readAddress();
  } catch {
    main.append(heading('No such view'), problemNotice('The address of this page is not the name of a limit.'));
    return { refresh: async () => {} };
  }
  return VIEWS[name](main, context);
}

function show() {
  const named = location.hash.replace(/^#\/?/, '').split(/[/?]/)[0];
  const name = Object.hasOwn(VIEWS, MOVED[named] ?? named) ? (MOVED[named] ?? named) : 'fleet';
  clearInterval(current.timer);
  updatedAt = null;
  const main = byId('main');
  main.replaceChildren(element('p', { id: 'load-error', class: 'error', role: 'alert' }));
  // A key belongs to the keys, another replica to the fleet.
  const place = name === 'key' ? 'keys' : location.hash.startsWith('#/replica/') ? 'fleet' : name;
  for (const link of document.querySelectorAll('nav a')) {
    if (link.getAttribute('href') === `#/${place}`) link.setAttribute('aria-current', 'page');
    else link.removeAttribute('aria-current');
  }
  const view = openView(main, name);
  let isBusy = false;
  const refresh = async () => {
    if (isBusy || document.hidden) return;
    isBusy = true;
    await load(view.refresh);
    isBusy = false;
  };
  current = { view, name, refresh, timer: view.every ? setInterval(refresh, view.every * 1000) : null };
  showTitle();
  for (const [control, change] of view.change ?? []) {
    let typing = null;
    control.addEventListener('input', () => {
      clearTimeout(typing);
      typing = setTimeout(() => load(change), control.type === 'search' ? TYPING_MS : 0);
    });
  }
  showClock();
  refresh();
}

window.addEventListener('hashchange', () => {
  byId('dialog').close();
  show();
  byId('main').focus();
});

document.addEventListener('visibilitychange', () => {
  if (document.hidden) {
    live.source?.close();
    live.source = null;
  } else {
    live.silence = '';
    connect();
    current.refresh();
    loadAlarms();
  }
  showClock();
});

// Theme and token.

const THEMES = ['system', 'light', 'dark'];

function applyTheme(theme) {
  if (theme === 'system') delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId('theme').textContent = theme === 'system' ? 'Theme' : `Theme: ${theme}`;
}

let theme = THEMES.includes(localStorage.getItem(THEME)) ? localStorage.getItem(THEME) : 'system';
applyTheme(theme);
byId('theme').addEventListener('click', () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  localStorage.setItem(THEME, theme);
  applyTheme(theme);
});

byId('token').addEventListener('click', () => (hasToken() ? forgetToken() : askForToken()));

// What is wrong is there when the first view is.
const hasAlarms = loadAlarms();
showToken();
show();
connect();
