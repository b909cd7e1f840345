#![no_main]

#[path = "../checks/json.rs"]
mod checks;
#[path = "../checks/decider.rs"]
mod decider;

libfuzzer_sys::fuzz_target!(|data: &[u8]| checks::check(data));
