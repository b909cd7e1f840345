//! `man` and `completions`: manual pages and completion scripts of shells, from the definition of the command line.

use std::fs;
use std::io;
use std::path::PathBuf;

use clap_complete::Shell;
use clap_mangen::Man;

use super::print::{CommandOutcome, fail_if_unwritten, print_error, print_to_stdout, usage_error};

pub(super) const MAN_HELP: &str = "\
Without --dir it prints one page; `man -l -` shows it. The pages of all commands belong in /usr/local/share/man/man1.

  tollkeeper man check
  tollkeeper man --dir man1

Exit codes: 0 printed, 1 the output could not be written, 2 no such command.";

pub(super) const COMPLETIONS_HELP: &str = "\
For a shell that runs, or as a file: bash reads /usr/share/bash-completion/completions/tollkeeper, zsh _tollkeeper \
in a directory of fpath, fish ~/.config/fish/completions/tollkeeper.fish.

  source <(tollkeeper completions bash)
  tollkeeper completions zsh > _tollkeeper

Exit codes: 0 printed, 1 the output could not be written.";

/// Arguments of `man`.
#[derive(Debug, clap::Args)]
pub(super) struct ManArgs {
    /// Command of the page; without it, the page of the program
    #[arg(value_name = "COMMAND", conflicts_with = "dir")]
    command: Option<String>,
    /// Write the pages of all commands to this directory, which is created
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

/// Arguments of `completions`.
#[derive(Debug, clap::Args)]
pub(super) struct CompletionsArgs {
    /// Shell
    shell: Shell,
}

/// Prints the manual page of the program or of a command, or writes those of all to a directory.
pub(super) fn run_man(args: &ManArgs, mut program: clap::Command) -> CommandOutcome {
    // Commands get their whole names, such as `tollkeeper-check`.
    program.build();
    let shown = |command: &clap::Command| !command.is_hide_set() && command.get_name() != "help";
    if let Some(dir) = &args.dir {
        let mut pages = vec![&program];
        pages.extend(program.get_subcommands().filter(|command| shown(command)));
        let write = |page: &clap::Command| {
            let name = page.get_display_name().unwrap_or(page.get_name());
            build_page(page.clone()).render(&mut fs::File::create(dir.join(format!("{name}.1")))?)
        };
        let written = fs::create_dir_all(dir).and_then(|()| pages.into_iter().try_for_each(write));
        return match written {
            Ok(()) => CommandOutcome::Success,
            Err(error) => {
                print_error(format_args!("{}: {error}", dir.display()));
                CommandOutcome::Failure
            }
        };
    }
    let page = match &args.command {
        None => program,
        Some(name) => match program.find_subcommand(name).filter(|command| shown(command)) {
            Some(command) => command.clone(),
            None => return usage_error(format_args!("man: no command '{name}': tollkeeper --help lists them")),
        },
    };
    print_bytes(|text| build_page(page).render(text))
}

/// Manual page of a command, which names the version of the program.
fn build_page(command: clap::Command) -> Man {
    Man::new(command).source(concat!("tollkeeper ", env!("CARGO_PKG_VERSION"))).manual("tollkeeper")
}

/// Prints the completion script of a shell.
pub(super) fn run_completions(args: &CompletionsArgs, mut program: clap::Command) -> CommandOutcome {
    print_bytes(|text| {
        clap_complete::generate(args.shell, &mut program, "tollkeeper", text);
        Ok(())
    })
}

/// Prints what `write` writes. Generators panic or stop at a closed output, so they write to memory.
fn print_bytes(write: impl FnOnce(&mut Vec<u8>) -> io::Result<()>) -> CommandOutcome {
    let mut text = Vec::new();
    let written = write(&mut text).and_then(|()| print_to_stdout(String::from_utf8_lossy(&text)));
    fail_if_unwritten(written, CommandOutcome::Success)
}
