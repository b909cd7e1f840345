#![no_main]

#[path = "../checks/wildcard.rs"]
mod checks;

libfuzzer_sys::fuzz_target!(|data: &[u8]| checks::check(data));
