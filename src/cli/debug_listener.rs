//! Asking the debug listener of a running server.

use std::time::Duration;

use super::print::short;
use crate::settings::target::Target;

/// How long a server may take.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The largest page that is read, in bytes.
const MOST_BYTES: u64 = 64 << 20;

/// The page at `path`, asked for with `body` if there is one; what went wrong otherwise, in words for whoever asked.
pub(super) fn ask(target: &Target, path: &str, body: Option<&str>) -> Result<Vec<u8>, String> {
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
    let page = response.body_mut().with_config().limit(MOST_BYTES).read_to_vec().map_err(failed)?;
    if response.status() == 404 {
        let path = path.split('?').next().unwrap_or(path);
        return Err(format!("{address} has no {path}; is it the debug listener (DEBUG_PORT) of a tollkeeper?"));
    }
    if response.status() != 200 {
        let message = short(String::from_utf8_lossy(&page).trim_end());
        return Err(format!("{address} answered {}: {message}", response.status()));
    }
    Ok(page)
}
