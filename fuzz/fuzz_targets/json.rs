#![no_main]

#[path = "../checks/json.rs"]
mod checks;
#[path = "../checks/desk.rs"]
mod desk;

libfuzzer_sys::fuzz_target!(|data: &[u8]| checks::check(data));
