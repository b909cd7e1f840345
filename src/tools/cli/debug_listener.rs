//! Requests to the debug listener of a running server.

use std::time::Duration;

use crate::base::text::printable;
use crate::settings::address::Target;

/// Time limit of a request.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum size of a page in bytes.
const MAX_PAGE_BYTES: u64 = 64 << 20;
/// Maximum size of the reason for an error that is shown, in bytes.
const MAX_REASON_BYTES: usize = 300;

/// Fetches the page at `path`, by POST if there is a body. The error is a message for the user.
pub(super) fn fetch(target: &Target, path: &str, body: Option<&str>) -> Result<Vec<u8>, String> {
    let Target::Tcp(address) = target else {
        return Err(format!("--addr {target}: the debug listener has no unix socket; give HOST:PORT"));
    };
    let failed = |error: ureq::Error| {
        format!(
            "{address} did not answer: {error}; is the service running, with its debug listener (DEBUG_PORT) there?"
        )
    };
    let agent = ureq::Agent::config_builder()
        .timeout_global(Some(TIMEOUT))
        .http_status_as_error(false)
        .max_redirects(0)
        .proxy(None)
        .build()
        .new_agent();
    let url = format!("http://{address}{path}");
    let response = match body {
        Some(body) => agent.post(url).send(body),
        None => agent.get(url).call(),
    };
    let mut response = response.map_err(failed)?;
    let page = response.body_mut().with_config().limit(MAX_PAGE_BYTES).read_to_vec().map_err(failed)?;
    if response.status() == 404 {
        let path = path.split('?').next().unwrap_or(path);
        return Err(format!("{address} has no {path}; is it the debug listener (DEBUG_PORT) of tollkeeper?"));
    }
    if response.status() != 200 {
        let text = String::from_utf8_lossy(&page[..page.len().min(MAX_REASON_BYTES)]);
        let message = printable(text.trim_end());
        return Err(format!("{address} answered {}: {message}", response.status()));
    }
    Ok(page)
}
