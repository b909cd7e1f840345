//! `.ci/generate`: writes the files that come from the program, the chart's values and the `.proto` files.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a failure ends the program, as it does a test")]

#[allow(dead_code, reason = "tests use the rest")]
mod generated;

fn main() {
    for file in generated::all_files() {
        if let Some(path) = file.write() {
            #[expect(clippy::print_stdout, reason = "it is a command")]
            {
                println!("{path}");
            }
        }
    }
}
