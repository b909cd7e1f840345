//! Freezing and killing of child processes. The sockets of a frozen one stay open, and it replies to nothing.
//!
//! Signals go by pid to children that have not been reaped, so the pid cannot belong to another process.

use std::fs;
use std::process::Child;

use rustix::process::{Pid, Signal, kill_process};

use super::wait_for;

/// Stops the child with SIGSTOP and waits until it has stopped; a stopped child can be killed.
pub fn freeze(child: &Child) {
    send(child, Signal::STOP);
    wait_for("the child to stand still", || (state(child) == Some('T')).then_some(()));
}

/// Continues a frozen child, which then handles the bytes received meanwhile.
pub fn thaw(child: &Child) {
    send(child, Signal::CONT);
}

/// Interrupts the child, as Ctrl-C does.
pub fn interrupt(child: &Child) {
    send(child, Signal::INT);
}

/// Kills the child with SIGKILL and waits until it has ended.
pub fn kill(child: &mut Child) {
    // Both fail only if the process has ended already.
    let _ = child.kill();
    let _ = child.wait();
}

fn send(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).expect("the child is not waited for yet");
}

/// State letter in `/proc/PID/stat`, after the program's name in parentheses; `None` if the process has ended.
fn state(child: &Child) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{}/stat", child.id())).ok()?;
    stat.rsplit_once(')')?.1.trim_start().chars().next()
}

/// Sends SIGTERM to a process that is no child, such as the first one of a container.
pub fn terminate(process: u32) {
    let process = i32::try_from(process).ok().and_then(Pid::from_raw).expect("it is the id of a process");
    kill_process(process, Signal::TERM).expect("the process runs");
}
