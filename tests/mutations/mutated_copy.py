"""A copy of the repository in which each row of a table is broken, and the tests that notice.

All mutations are built at once, each behind the environment variable MUTATION, so one build serves all. A script names
the rows; `run` builds the copy, runs the tests once without a mutation, which must pass, and those of each row once
with its mutation, which must fail.

A filter of tests is one of the suite. With --world, or in a script whose rows have no filters, a row runs on the simulated
world (tests/world) instead: seeds of the kinds of runs that it is about, one after the other, until one is red.

A copy has its own target directory: in a shared one, cargo takes the crates of one copy for those of another.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
VARIABLE = "MUTATION"

SWITCH = """
/// Returns true if this mutation is on.
pub fn is_mutated(number: u32) -> bool {
    mutation() == number
}

/// Number of the mutation that is on; 0: none.
pub fn mutation() -> u32 {
    static MUTATION: std::sync::LazyLock<u32> = std::sync::LazyLock::new(|| {
        std::env::var("MUTATION").ok().and_then(|number| number.parse().ok()).unwrap_or_default()
    });
    *MUTATION
}
"""

SCRIPTS = """
/// Text of a script with the mutation that is on.
pub fn mutated_script(text: String) -> String {
    match mutation() {
LUA_ARMS        _ => text,
    }
}

/// Replaces a text of a script, and says so, once.
fn replaced(text: &str, old: &str, new: &str) -> String {
    static SAID: std::sync::Once = std::sync::Once::new();
    if text.contains(old) {
        SAID.call_once(|| eprintln!("MUTATED_SCRIPT"));
    }
    text.replace(old, new)
}
"""

# What a program prints that has built the script of its mutation.
MUTATED_SCRIPT = "MUTATED_SCRIPT"
# Kinds of runs of the simulated world: the remainder of a seed.
KINDS = 8
RUNS_OF_CALLS, RUNS_OF_QUOTAS, RUNS_OF_SLOTS, RUNS_OF_RESERVATIONS = (0, 1), (4, 5), (6,), (7,)
# Time after which a run that does not end counts as red, in seconds.
HANGS_AFTER = 120


class Mutations:
    """Rows by their number, and the texts of the files that they change."""

    def __init__(self):
        self.rows, self.texts = {}, {}
        # Kinds of runs by row, and the rows of scripts.
        self.kinds, self.scripts = {}, set()
        self.append("src/core.rs", SWITCH)
        for root in ["store_crate", "rules_crate", "service", "lib"]:
            self.append(f"src/{root}.rs", "\npub use tollkeeper_core::{is_mutated, mutation};\n")
        self.change("tests/kit/tollkeeper.rs", '["PATH", ', f'["{VARIABLE}", "PATH", ')

    def text(self, path):
        return self.texts.get(path) or (ROOT / path).read_text()

    def change(self, path, old, new):
        self.texts[path] = replaced(self.text(path), old, new, path)

    def append(self, path, text):
        self.texts[path] = self.text(path) + text

    def add_row(self, name, tests, kinds=()):
        """Returns the number of the new row. `tests` are filters, the fastest first; `kinds` those of runs, (): all."""
        number = len(self.rows) + 1
        self.rows[number] = (name, tests)
        self.kinds[number] = kinds
        return number

    def add_rust(self, of, table, tests_of_file, kinds=(), unseen=()):
        """Adds a table of path, text, replacement, and what each $N of the replacement breaks: a row of the protocol,
        what is broken, and the filters of tests if not those of the file. On the simulated world, a row runs in runs of
        these kinds, unless it is in one of the `unseen` files, which no simulated run uses."""
        for path, old, new, broken in table:
            kinds_of_row = None if path in unseen else kinds
            for index, (row, what, *tests) in enumerate(broken):
                number = self.add_row(f"{of}{row}: {what}", *(tests or [tests_of_file.get(path, [])]), kinds_of_row)
                new = new.replace(f"${index}", f"crate::is_mutated({number})")
            self.change(path, old, new)

    def add_lua(self, names, of, rows, tests, kinds=()):
        """Adds mutations of scripts, a tuple of what is broken, text and replacement each; returns their arms of
        `mutate_scripts`. Scripts have neither indentation nor comments, and parts in place of references."""
        parts = "\n".join(self.text(f"src/store/redis/lua/{name}.lua") for name in names)
        trimmed = "\n".join(line.strip() for line in parts.split("\n"))
        arms = ""
        for what, old, new in rows:
            replaced(trimmed, old, new, f"lua, {what}")
            if any(line.startswith("--") for line in old.split("\n")):
                raise SystemExit(f"lua, {what}: no script has {old!r}, because comments and references are replaced")
            number = self.add_row(f"{of}Redis, {what}", tests, kinds)
            self.scripts.add(number)
            arms += f'        {number} => replaced(&text, "{old}", "{new}"),\n'.replace("\n", "\\n")[:-2] + "\n"
        return arms

    def mutate_scripts(self, arms):
        """Makes the scripts those of the mutation that is on."""
        self.append("src/store_crate.rs", SCRIPTS.replace("LUA_ARMS", arms))
        self.change("src/store/client/redis/connection.rs",
                    "    pub fn new(text: String) -> Self {\n        let sha1",
                    "    pub fn new(text: String) -> Self {\n        let text = crate::mutated_script(text);\n"
                    "        let sha1")

    def write(self, copy):
        """Copies the files that git knows, or their changed texts."""
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for file in filter(None, listed.split("\n")):
            target = copy / file
            if file in self.texts:
                write_if_changed(target, self.texts[file])
            elif not target.exists() or target.read_bytes() != (ROOT / file).read_bytes():
                # With the time of now: cargo builds what is newer than its last build.
                target.parent.mkdir(parents=True, exist_ok=True)
                target.unlink(missing_ok=True)
                shutil.copy(ROOT / file, target, follow_symlinks=False)


def replaced(text, old, new, path):
    if text.count(old) != 1:
        raise SystemExit(f"{path} has changed: it has {text.count(old)} times {old!r}")
    return text.replace(old, new)


def write_if_changed(file, text):
    """Writes a file unless it has this text, so that cargo builds no more than it must."""
    if not file.exists() or file.read_text() != text:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def build_tests(copy, target):
    """Builds the tests of a target; returns the program."""
    # Seeds are many: with optimisations.
    profile = ["--profile", "simulation"] if target == "world" else []
    env = os.environ | {"CARGO_TARGET_DIR": str(copy / "target")}
    built = subprocess.run(["cargo", "test", *profile, "--no-run", "--test", target, "--message-format", "json"], cwd=copy,
                           env=env, check=True, stdout=subprocess.PIPE, text=True).stdout
    messages = [json.loads(line) for line in built.splitlines()]
    return next(one["executable"] for one in messages
                if one.get("executable") and one.get("profile", {}).get("test") and one["target"]["name"] == target)


def run_tests(program, copy, number, tests):
    """Names of the tests that fail with a mutation, those of the first of these filters where one does."""
    # A failing seed that is kept would be the next row's.
    env = os.environ | {VARIABLE: str(number), "PROPTEST_DISABLE_FAILURE_PERSISTENCE": "true"}
    for filter_of_tests in tests:
        # A cluster runs the same scripts.
        ran = subprocess.run([program, "--quiet", filter_of_tests, "--skip", "in_a_cluster"], cwd=copy, env=env,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        failed = sorted(set(re.findall(r"^    ([a-z_:0-9]+)$", ran.stdout, re.MULTILINE)))
        # Without names: a mutation ended the process.
        if ran.returncode != 0:
            return failed or [f"{filter_of_tests}: {ran.stdout[-300:]}"]
        if "running 0 tests" in ran.stdout and not re.search(r"running [1-9]", ran.stdout):
            raise SystemExit(f"no test has the name {filter_of_tests}")
    return []


def run_seeds(program, copy, number, mutations, options):
    """What the seeds of a row say: whether one is red, and a text."""
    kinds = mutations.kinds.get(number, ())
    seeds = options.seeds * KINDS // (len(kinds) or KINDS)
    env = os.environ | {VARIABLE: str(number), "WORLD_SEEDS": str(seeds), "WORLD_UNTIL_RED": "1",
                        "WORLD_KIND": ",".join(map(str, kinds)), "WORLD_SECONDS": str(options.seconds)}
    command = [program, "--nocapture", "promises_hold_in_simulated_runs"]
    try:
        ran = subprocess.run(command, cwd=copy, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                             errors="replace", timeout=options.seconds + HANGS_AFTER)
    except subprocess.TimeoutExpired:
        return True, "red: a run does not end"
    if red := re.search(r"red after (\d+) runs", ran.stdout):
        return True, f"red after {red[1]}"
    if ran.returncode != 0:
        return True, "red: the program ended"
    if number in mutations.scripts and MUTATED_SCRIPT not in ran.stdout:
        return False, "REFUSED: no script that these runs build has its text"
    runs = re.search(r"^(\d+) runs,", ran.stdout, re.MULTILINE)
    return False, f"SURVIVED {runs[1]}"


def numbers_of(text):
    """Numbers of a list as 1,3-5."""
    ranges = [part.partition("-") for part in text.split(",")]
    return [number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)]


def run(doc, mutations):
    """Runs a script with this doc string; ends the process."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("copy", type=pathlib.Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--list", action="store_true", help="print the rows and run nothing")
    parser.add_argument("--world", action="store_true", help="run each row on the simulated world, whatever its filters are")
    parser.add_argument("--seeds", type=int, default=1000, help="seeds of the simulated world until a row counts as a hole")
    parser.add_argument("--seconds", type=int, default=600, help="the same in time")
    options = parser.parse_args()
    copy = options.copy.resolve()
    if copy == ROOT or ROOT in copy.parents:
        raise SystemExit("COPY must lie outside of the repository")
    rows = mutations.rows
    if options.list:
        print("".join(f"{number:>3} {name}\n" for number, (name, _) in rows.items()), end="")
        return
    mutations.write(copy)
    asked = numbers_of(options.only) if options.only else list(rows)
    filters = {test for number in asked for test in rows[number][1]}
    if options.world or not filters:
        program = build_tests(copy, "world")
        is_red, told = run_seeds(program, copy, 0, mutations, options)
        if is_red:
            raise SystemExit(f"without a mutation the simulated world is {told}")
        raise SystemExit(bool(count_holes(program, copy, mutations, asked, options)))
    program = build_tests(copy, "suite")
    failed = run_tests(program, copy, 0, sorted(filters))
    if failed != []:
        raise SystemExit(f"without a mutation the tests fail: {failed}")
    raise SystemExit(bool(count_survivors(program, copy, rows, asked)))


def count_survivors(program, copy, rows, asked):
    """Runs rows and prints each; returns the number of those that no test notices."""
    survived = 0
    print(f"{len(asked)} of {len(rows)} rows", flush=True)
    for number in asked:
        name, tests = rows[number]
        failed = run_tests(program, copy, number, tests)
        survived += not failed
        more = f" and {len(failed) - 1} more" if failed and len(failed) > 1 else ""
        print(f"{number:>3} {name:<95} {f'red: {failed[0]}{more}' if failed else 'SURVIVED'}")
        sys.stdout.flush()
    return survived


def count_holes(program, copy, mutations, asked, options):
    """Runs rows on the simulated world and prints each; returns the number of those that stay green."""
    holes = 0
    print(f"{len(asked)} of {len(mutations.rows)} rows, {options.seeds} seeds each", flush=True)
    for number in asked:
        if mutations.kinds[number] is None:
            print(f"{number:>3} {mutations.rows[number][0]:<95} not run: no simulated run uses this file", flush=True)
            continue
        is_red, told = run_seeds(program, copy, number, mutations, options)
        holes += not is_red
        print(f"{number:>3} {mutations.rows[number][0]:<95} {told}", flush=True)
    return holes
