//! Huge pages of memory, only once they pay.
//!
//! The allocator asks the system for them. A process that has just started would get five, 10 MB for less than one;
//! finding a counter among a million costs a tenth less with them. So this process does without until it has grown.

use procfs::ProcResult;
use procfs::process::Process;
use rustix::thread::disable_transparent_huge_pages;

/// From this much memory of its own on, what a huge page may waste matters no more.
const GROWN_BYTES: u64 = 32 * 1024 * 1024;

/// Does without from now on; those that were given stay.
pub fn defer() {
    // Where the system does not let us, this process takes a little more memory.
    let _more = disable_transparent_huge_pages(true);
}

/// Takes them from now on if this process has grown; whether it has.
pub fn allow_if_grown() -> bool {
    let has_grown = own_bytes().is_ok_and(|bytes| bytes >= GROWN_BYTES);
    if has_grown {
        // Where the system does not let us, this process is a little slower.
        let _slower = disable_transparent_huge_pages(false);
    }
    has_grown
}

/// Resident memory that is not of a file.
fn own_bytes() -> ProcResult<u64> {
    let pages = Process::myself()?.statm()?;
    Ok(pages.resident.saturating_sub(pages.shared) * procfs::page_size())
}
