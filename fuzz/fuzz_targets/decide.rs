#![no_main]

#[path = "../checks/decide.rs"]
mod checks;
#[path = "../checks/decider.rs"]
mod decider;

libfuzzer_sys::fuzz_target!(|data: &[u8]| checks::check(data));
