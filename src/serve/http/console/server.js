// Requests to the server, dialogs, the admin token, and the state that is in the address of a view.

import { byId, code, element, number, para, printable, problemNotice } from './dom.js';

// A server that hangs must not keep the view from asking again.
const ANSWER_TIMEOUT_MS = 15000;
const TOKEN = 'tollkeeper-admin-token';

export class PageError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function request(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { signal: AbortSignal.timeout(ANSWER_TIMEOUT_MS), cache: 'no-store', credentials: 'omit', redirect: 'error', ...options });
  } catch {
    throw new PageError(0, 'The server does not answer. Is it running, and is the port-forward still open?');
  }
  const text = await response.text();
  if (!response.ok) throw new PageError(response.status, text.trim() || `The server answered ${response.status}.`);
  return text;
}

export const getJson = async (path, options) => JSON.parse(await request(path, options));

export function withQuery(path, query) {
  const search = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== '' && value !== undefined && value !== false));
  return search.size > 0 ? `${path}?${search}` : path;
}

/** A request with the admin token; asks for the token if there is none or it is wrong. */
export async function adminRequest(path, options = {}) {
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
      forgetToken();
      if (!(await askForToken(error.message))) return null;
    }
  }
}

/** Shows a dialog; resolves to true if it was confirmed. `submit` may throw to keep it open with an error. */
export function ask({ title, body, confirm, cancel = 'Cancel', danger = false, problem = '', submit = async () => {} }) {
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

export async function askForToken(problem = '') {
  const input = element('input', { type: 'password', id: 'token-input', autocomplete: 'off', required: true });
  return ask({
    title: 'Admin token',
    body: [
      para('Actions need the token of TOLLKEEPER_ADMIN_TOKEN. It is kept for this tab, until you close it.'),
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

export const hasToken = () => sessionStorage.getItem(TOKEN) !== null;

export function forgetToken() {
  sessionStorage.removeItem(TOKEN);
  showToken();
}

export function showToken() {
  byId('token').textContent = hasToken() ? 'Forget admin token' : 'Admin token';
}

/** Tells the result of an action. */
export function tell(title, ...body) {
  return ask({ title, body, confirm: 'Close', cancel: null });
}

// The address of a view: `#/view/argument?state`. The server never sees it.

/** Name, argument and state of the view that is shown. Throws on a malformed address. */
export function readAddress() {
  const [path, query = ''] = location.hash.replace(/^#\/?/, '').split(/\?(.*)/s);
  const [name, ...rest] = path.split('/');
  return { name, argument: decodeURIComponent(rest.join('/')), state: new URLSearchParams(query) };
}

/** Puts state of the view into its address, in the place of the last one. Empty values are left out. */
export function writeState(values) {
  const [path, query = ''] = location.hash.split(/\?(.*)/s);
  const state = new URLSearchParams(query);
  for (const [key, value] of Object.entries(values)) {
    if (value === '' || value === false || value === null || value === undefined) state.delete(key);
    else state.set(key, value);
  }
  history.replaceState(null, '', state.size > 0 ? `${path || '#/fleet'}?${state}` : path || '#/fleet');
}

/** A field for a search, with what the address has of it. */
export const searchInput = (id, placeholder) =>
  element('input', { type: 'search', id, placeholder, autocomplete: 'off', value: readAddress().state.get(id) ?? '' });

export const ruleAddress = (rule) => `#/rules/${encodeURIComponent(rule)}`;

/** Address of a key: its domain, and its entries in their order. */
export function keyAddress(domain, entries) {
  const state = new URLSearchParams({ domain });
  for (const { key, value } of entries) {
    state.append('k', key);
    state.append('v', value);
  }
  return `#/key?${state}`;
}

export const explainBody = (asked) => JSON.stringify(asked);
export const explain = (asked) => getJson('explain', { method: 'POST', body: explainBody(asked) });

/** Deletes the counters of a request, after a question. Resolves to true if they were deleted. */
export async function resetCounters(asked, name) {
  const confirmed = await ask({
    title: 'Reset counters?',
    body: [para('Deletes the counters of ', code(name), ` in domain ${printable(asked.domain)}, in all replicas. The key starts at zero.`)],
    confirm: 'Reset',
    danger: true,
  });
  if (!confirmed) return false;
  try {
    const text = await adminRequest('reset', { method: 'POST', body: explainBody(asked) });
    if (text === null) return false;
    const { reset, announced } = JSON.parse(text);
    const deleted = reset.reduce((sum, count) => sum + count, 0);
    const others = announced === false ? ' The other replicas could not be told: their caches end within a second.' : '';
    await tell('Reset', para(`${number(deleted)} counters of ${name} were deleted.${others}`));
    return true;
  } catch (error) {
    await tell('Not reset', problemNotice(error.message));
    return false;
  }
}
