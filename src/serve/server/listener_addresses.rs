//! Validation of the addresses to listen on, before any listener opens.
//!
//! A port that another process uses is no problem here. Two listeners of this process with one port are.

use std::io;
use std::net::SocketAddr;
use std::path::Path;

use super::error::StartupError;
use super::sockets::{find_bindable_address, try_bind_unix_path};
use crate::settings::Settings;
use crate::settings::address::Address;
use crate::settings::listeners::GrpcListenAddress;

/// Address of a listener, with the variables that give it.
#[derive(Clone, Copy)]
pub(super) struct ListenerAddress<'s> {
    pub(super) host_setting: &'static str,
    pub(super) port_setting: &'static str,
    pub(super) address: &'s Address,
}

impl ListenerAddress<'_> {
    /// Error of the address; it names the variable that is at fault: the port if that is in use or not permitted.
    pub(super) fn build_startup_error(&self, error: io::Error) -> StartupError {
        let setting = match error.kind() {
            io::ErrorKind::AddrInUse | io::ErrorKind::PermissionDenied => self.port_setting,
            _ => self.host_setting,
        };
        StartupError::Listen { setting, address: self.address.to_string(), error }
    }
}

/// Error of the path of a Unix socket.
pub(super) fn build_unix_socket_error(path: &Path, error: io::Error) -> StartupError {
    StartupError::Listen { setting: "GRPC_UDS", address: path.display().to_string(), error }
}

/// Address of the gRPC listener.
pub(super) fn grpc_address(address: &Address) -> ListenerAddress<'_> {
    ListenerAddress { host_setting: "GRPC_HOST", port_setting: "GRPC_PORT", address }
}

/// Address of the HTTP listener.
pub(super) fn http_address(settings: &Settings) -> ListenerAddress<'_> {
    ListenerAddress { host_setting: "HOST", port_setting: "PORT", address: &settings.listeners.http }
}

/// Address of the debug listener.
pub(super) fn debug_address(settings: &Settings) -> ListenerAddress<'_> {
    ListenerAddress { host_setting: "DEBUG_HOST", port_setting: "DEBUG_PORT", address: &settings.listeners.debug }
}

/// Address of the Prometheus listener; `None` if it is off.
pub(super) fn prometheus_address(settings: &Settings) -> Option<ListenerAddress<'_>> {
    let address = &settings.metrics.prometheus.as_ref()?.address;
    Some(ListenerAddress { host_setting: "PROMETHEUS_ADDR", port_setting: "PROMETHEUS_ADDR", address })
}

/// Finds addresses that do not resolve, are not local or not permitted, and ports that two listeners have.
pub(super) fn find_address_problems(settings: &Settings) -> Vec<StartupError> {
    let mut problems = Vec::new();
    let grpc = match &settings.listeners.grpc {
        GrpcListenAddress::Tcp(address) => Some(grpc_address(address)),
        GrpcListenAddress::Unix(path) => {
            problems.extend(try_bind_unix_path(path).err().map(|error| build_unix_socket_error(path, error)));
            None
        }
    };
    let all = [grpc, Some(http_address(settings)), Some(debug_address(settings)), prometheus_address(settings)];
    let mut checked: Vec<(ListenerAddress<'_>, SocketAddr)> = Vec::new();
    for listener in all.into_iter().flatten() {
        let resolved = match find_bindable_address(listener.address) {
            Ok(resolved) => resolved,
            Err(error) => {
                problems.push(listener.build_startup_error(error));
                continue;
            }
        };
        if let Some((other, _)) = checked.iter().find(|(_, other)| addresses_conflict(resolved, *other)) {
            let what = format!("{} is the same address", other.port_setting);
            problems.push(listener.build_startup_error(io::Error::new(io::ErrorKind::AddrInUse, what)));
        }
        checked.push((listener, resolved));
    }
    problems
}

/// Returns `true` if two listeners cannot both listen on these addresses.
fn addresses_conflict(one: SocketAddr, other: SocketAddr) -> bool {
    let is_any = one.ip().is_unspecified() || other.ip().is_unspecified();
    one.port() == other.port() && one.port() != 0 && (is_any || one.ip() == other.ip())
}
