#!/usr/bin/env python3
"""Breaks the protocol of slots, row by row, and tells which tests notice.

Usage: tests/mutations/slots.py COPY [--only NUMBER,NUMBER]

COPY is a directory for a changed copy of the repository; CARGO_TARGET_DIR may name a target directory to share. All
mutations are built at once, each behind the environment variable SLOT_MUTATION, so one build serves all. Then the tests
of slots run once without a mutation, which must pass, and once with each, which must fail. Ends with 1 if one does not.

The rows are those of the protocol in docs/rules.md (concurrent) and docs/concurrency.md. tests/run.sh sets what the
tests need.
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
ALGORITHM, TABLE = "src/limit/algorithm/slots.rs", "src/limit/slot_table.rs"
SEPARATE, ANSWER = "src/decide/slots.rs", "src/decide/slot_answers.rs"
HOLDERS, MEMORY, SERVICE = "src/store/holders.rs", "src/store/memory/slots.rs", "src/serve/grpc/service.rs"
TEXTS = "src/limit/slot.rs"
IN_MEMORY = ["slots::table", "slots::protocol::memory", "slots::memory"]
IN_REDIS = ["slots::agreement::script_agrees_with_the_table", "slots::protocol::redis"]
THROUGH_THE_PROGRAM = ["slots::binary"]
# Tests of what is in a file; others are tests in memory.
FILTERS = {HOLDERS: THROUGH_THE_PROGRAM, SERVICE: THROUGH_THE_PROGRAM, "slots.lua": IN_REDIS}

# File, text, replacement, and for each $N of the replacement the row of the protocol and what is broken.
RUST = [
    (ANSWER, "TokenText { id: slot.id, token: slot.token }",
     "TokenText { id: slot.id, token: if $0 { crate::limit::slot::SlotToken(7) } else { slot.token } }",
     [("acquire, room", "the answer has another token")]),
    (ANSWER, "decision.metadata.get_or_insert_default().insert(METADATA_KEY.to_owned(), token.into());",
     "if !$0 { decision.metadata.get_or_insert_default().insert(METADATA_KEY.to_owned(), token.into()); }",
     [("acquire, room", "the answer has no token")]),
    (ALGORITHM, "(request.required_hits()) <= u64::from(limit.requests_per_unit()),",
     "(request.required_hits()) <= u64::from(limit.requests_per_unit()) + u64::from($0),",
     [("acquire, full", "one more is admitted")]),
    (ALGORITHM, "Hits::Charge(seats) if admitted && !request.rejected_elsewhere",
     "Hits::Charge(seats) if (admitted || $0) && (!request.rejected_elsewhere || $1)",
     [("acquire, full", "a rejected request takes a slot"), ("another limit rejects", "the slot is taken")]),
    (ANSWER, "        if decision.over_limit {\n            self.give",
     "        if decision.over_limit && !$0 {\n            self.give",
     [("another limit rejects", "of another descriptor: the slot is not given back")]),
    (ANSWER, "let token = match decision.over_limit {", "let token = match decision.over_limit && !$0 {",
     [("another limit rejects", "the answer has a token in place of -")]),
    (ALGORITHM, "self.own = OwnSlot::Held { token: self.token, seats };\n                SlotChange::Renewed",
     "if !$0 { self.own = OwnSlot::Held { token: self.token, seats }; }\n"
     "                self.used += u64::from($1);\n                SlotChange::Renewed",
     [("the id exists", "it keeps its token"), ("the id exists", "it counts twice")]),
    (ALGORITHM, "        OwnSlot::Held { .. } => true,",
     "        OwnSlot::Held { .. } => (!$0 || state.used < u64::from(limit.requests_per_unit()))"
     " && (!$1 || state.used <= u64::from(limit.requests_per_unit())),",
     [("the id exists", "it is rejected at the limit"), ("limit lowered", "streams that go on are rejected")]),
    (ALGORITHM, "if self.is_unanswered || token == self.token =>",
     "if self.is_unanswered && !$2 || token == self.token && !$1 || $0 && !self.is_unanswered =>",
     [("release, token", "an old token frees too"), ("release, token", "it frees nothing"),
      ("release ?", "it needs the token")]),
    (SEPARATE, "(unnamed, SlotToken::default(), SlotAction::ReleaseRejected)",
     "(unnamed, SlotToken::default(), if $0 { SlotAction::ReleaseUnanswered } else { SlotAction::ReleaseRejected })",
     [("release -", "it counts as ?")]),
    (ALGORITHM,
     "            OwnSlot::Absent if self.is_unanswered => {\n                self.own = OwnSlot::Tombstone;",
     "            OwnSlot::Absent if self.is_unanswered || $1 => {\n"
     "                if !$0 { self.own = OwnSlot::Tombstone; }",
     [("release ?", "an unknown slot leaves no tombstone"), ("tombstone's life", "a release by token writes one")]),
    (ALGORITHM, "if self.is_unanswered { OwnSlot::Tombstone }", "if self.is_unanswered && !$0 { OwnSlot::Tombstone }",
     [("release ?", "a freed slot leaves no tombstone")]),
    (ALGORITHM, "OwnSlot::Tombstone => false,", "OwnSlot::Tombstone => $0,", [("tombstone", "it admits")]),
    (ALGORITHM, "Hits::Charge(_) if state.own == OwnSlot::Tombstone => SlotChange::Late,",
     "Hits::Charge(_) if state.own == OwnSlot::Tombstone && !$1 => {"
     " if $0 { state.own = OwnSlot::Absent; } SlotChange::Late }",
     [("tombstone", "a late request removes it"), ("tombstone", "a late request is not told apart")]),
    (TABLE, "now.plus_us(TOMBSTONE_US)", "now.plus_us(TOMBSTONE_US + 1_000_000 * u64::from($0))",
     [("tombstone's life", "it lives for a second more")]),
    (TABLE, "if self.tombstones < MAX_TOMBSTONES {", "if self.tombstones < MAX_TOMBSTONES || $0 {",
     [("tombstone's life", "their number has no bound")]),
    (ALGORITHM, "OwnSlot::Held { .. } | OwnSlot::Absent | OwnSlot::Tombstone => SlotChange::None,",
     "OwnSlot::Held { .. } | OwnSlot::Absent | OwnSlot::Tombstone => {"
     " if $0 { self.used = self.used.saturating_sub(1); } SlotChange::None }",
     [("release twice; Redis lost its data", "an unknown token frees a seat")]),
    (SEPARATE, "(id, token, SlotAction::Release)", "(if $0 { unnamed } else { id }, token, SlotAction::Release)",
     [("release without slot", "the token does not name the slot")]),
    (SERVICE, "may_release(&request) && self.service", "may_release(&request) && !$0 && self.service",
     [("cancelled call", "the release ends with its caller")]),
    (SERVICE, "if is_unmade {", "if is_unmade && !$0 {",
     [("cancelled call", "a release that the store failed to make is not repeated")]),
    (TABLE, "slot.seats > 0 && is_dead(slot.holder);", "slot.seats > 0 && !$0 && is_dead(slot.holder);",
     [("holder", "a dead one keeps its slots")]),
    (HOLDERS, "self.update(HolderId::from_name(name), name, now, |holder| holder.has_heartbeats = true);",
     "self.update(HolderId::from_name(name), name, if $0 { Time::default() } else { now }, |holder|"
     " holder.has_heartbeats = true);",
     [("holder", "health checks are no signs of life")]),
    (HOLDERS, "holder.is_unreported && holder.has_heartbeats);",
     "holder.is_unreported && holder.has_heartbeats && !$0);",
     [("holder", "replicas share no signs of life")]),
    (HOLDERS, "(Some(holder), None) => holder.has_heartbeats,", "(Some(holder), None) => holder.has_heartbeats || $0,",
     [("Envoy without heartbeats", "it is dead after the timeout")]),
    (TABLE, "expires: now.plus_us(life_us), seats",
     "expires: now.plus_us(life_us * (1 + u64::from($0)) / (1 + u64::from($1))), seats",
     [("max_duration", "a slot lives on"), ("max_duration", "a slot ends early")]),
    (SEPARATE, 'entry.value.starts_with(b"%")', 'entry.value.starts_with(b"%") && !$0',
     [("value that begins with %", "it is taken")]),
    (ALGORITHM, "Hits::Charge(_) | Hits::Peek => SlotChange::None,",
     "Hits::Peek if $0 && state.own == OwnSlot::Absent => state.acquire(1),\n"
     "        Hits::Charge(_) | Hits::Peek => SlotChange::None,",
     [("peek", "it takes a slot")]),
    (ALGORITHM, "                self.used += seats;", "                self.used += if $0 { 1 } else { seats };",
     [("weight", "each slot is one seat")]),
    (ALGORITHM, "self.used = self.used.saturating_sub(u64::from(seats));",
     "self.used = self.used.saturating_sub(if $0 { 1 } else { u64::from(seats) });",
     [("weight", "a release gives one seat back")]),
    (TEXTS, "hasher.update(&holder.0.to_le_bytes());", "if !$0 { hasher.update(&holder.0.to_le_bytes()); }",
     [("id", "Envoys share their streams")]),
    (MEMORY, "self.bytes.fetch_sub(before.saturating_sub(table.bytes()), Ordering::Relaxed);",
     "if !$0 { self.bytes.fetch_sub(before.saturating_sub(table.bytes()), Ordering::Relaxed); }",
     [("memory", "a table that shrinks stays counted")]),
    (ALGORITHM, "let retry_after_us = if state.own == OwnSlot::Tombstone {",
     "let retry_after_us = if state.own == OwnSlot::Tombstone && !$0 {",
     [("tombstone", "a late request is told to come back at once")]),
]

# What is broken in src/store/redis/lua/slots.lua, text, replacement.
LUA = [
    ("acquire, full: one more is admitted", "used + hits <= limit", "used + hits <= limit + 1"),
    ("the id exists: it keeps its token", "  value = token .. holder", "  value = own_token .. holder"),
    ("the id exists: it counts twice", "if kind == 0 then used, seats = used + hits, hits end",
     "used, seats = used + hits, hits"),
    ("release, token: an old token frees too", "(is_unanswered or own_token == token)", "true"),
    ("release, token: it frees nothing", "(is_unanswered or own_token == token)", "is_unanswered"),
    ("release ?: a freed slot leaves no tombstone", "if hits <= 0 and is_unanswered and tombstones < 10000 then",
     "if hits <= 0 and is_unanswered and tombstones < 10000 and not own then"),
    ("release ?: an unknown slot leaves no tombstone", "if hits <= 0 and is_unanswered and tombstones < 10000 then",
     "if hits <= 0 and is_unanswered and tombstones < 10000 and own then"),
    ("tombstone: it lives for a second more", "now + 15000000", "now + 16000000"),
    ("tombstone: the head keeps one that expired", "elseif found[2] and not own then", "elseif false then"),
    ("holder: a dead one keeps its slots", "of_slot > 0 and dead[string.sub(fields[i + 1], 9, 16)]", "false"),
    ("max_duration: a slot lives on", "pack('<I8I4', now + period, seats)",
     "pack('<I8I4', now + 2 * period, seats)"),
    ("weight: a release gives one seat back", "used, kind, seats = used - seats, 0, 0",
     "used, kind, seats = used - 1, 0, 0"),
    ("a full hash is walked at once", "cursor == '0' and 1000000 or 20000", "cursor == '0' and 0 or 20000"),
]

SWITCH = """
/// Returns true if this mutation is on.
pub fn is_mutated(number: u32) -> bool {
    mutation() == number
}

fn mutation() -> u32 {
    static MUTATION: std::sync::LazyLock<u32> = std::sync::LazyLock::new(|| {
        std::env::var("SLOT_MUTATION").ok().and_then(|number| number.parse().ok()).unwrap_or_default()
    });
    *MUTATION
}

/// Text of a script with the mutation that is on.
pub fn mutated_script(text: String) -> String {
    match mutation() {
LUA_ARMS        _ => text,
    }
}
"""


def replaced(text, old, new, path):
    if text.count(old) != 1:
        raise SystemExit(f"{path} has changed: it has {text.count(old)} times {old!r}")
    return text.replace(old, new)


def write_if_changed(file, text):
    """Writes a file unless it has this text, so that cargo builds no more than it must."""
    if not file.exists() or file.read_text() != text:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def make_copy(copy):
    """Copies the files that git knows, with all mutations; returns name and tests of each, by number."""
    texts, mutations = {}, {}

    def change(path, old, new):
        text = texts.get(path) or (ROOT / path).read_text()
        texts[path] = replaced(text, old, new, path)

    for path, old, new, broken in RUST:
        for index, (row, what) in enumerate(broken):
            number = len(mutations) + 1
            mutations[number] = (f"{row}: {what}", FILTERS.get(path, IN_MEMORY))
            new = new.replace(f"${index}", f"crate::is_mutated({number})")
        change(path, old, new)
    script = (ROOT / "src/store/redis/lua/slots.lua").read_text()
    arms = ""
    for what, old, new in LUA:
        replaced(script, old, new, "slots.lua")
        number = len(mutations) + 1
        mutations[number] = (f"Redis, {what}", FILTERS["slots.lua"])
        arms += f'        {number} => text.replace(r#"{old}"#, r#"{new}"#),\n'
    texts["src/lib.rs"] = (ROOT / "src/lib.rs").read_text() + SWITCH.replace("LUA_ARMS", arms)
    change("src/store/client/redis/connection.rs", "    pub fn new(text: String) -> Self {\n        let hash",
           "    pub fn new(text: String) -> Self {\n        let text = crate::mutated_script(text);\n        let hash")
    change("tests/kit/tollkeeper.rs", '["PATH", ', '["SLOT_MUTATION", "PATH", ')
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\n")
    for file in filter(None, files):
        target = copy / file
        if file in texts:
            write_if_changed(target, texts[file])
        elif not target.exists() or target.stat().st_mtime != (ROOT / file).stat().st_mtime:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, target, follow_symlinks=False)
    return mutations


def run_tests(copy, number, tests):
    """Names of the tests that fail with a mutation; None if there was no result."""
    env = os.environ | {"SLOT_MUTATION": str(number)}
    ran = subprocess.run(["cargo", "test", "--quiet", "--test", "suite", "--", *tests], cwd=copy, env=env,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if "test result:" not in ran.stdout:
        print(ran.stdout[-3000:])
        return None
    return sorted(set(re.findall(r"^    ([a-z_:0-9]+)$", ran.stdout, re.MULTILINE)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("copy", type=pathlib.Path)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    copy = options.copy.resolve()
    if copy == ROOT or ROOT in copy.parents:
        raise SystemExit("COPY must lie outside of the repository")
    mutations = make_copy(copy)
    failed = run_tests(copy, 0, IN_MEMORY + IN_REDIS + THROUGH_THE_PROGRAM)
    if failed != []:
        raise SystemExit(f"without a mutation the tests fail: {failed}")
    asked = [int(number) for number in options.only.split(",")] if options.only else list(mutations)
    survived = 0
    for number in asked:
        name, tests = mutations[number]
        failed = run_tests(copy, number, tests)
        survived += not failed
        more = f" and {len(failed) - 1} more" if failed and len(failed) > 1 else ""
        print(f"{number:>3} {name:<75} {f'red: {failed[0]}{more}' if failed else 'SURVIVED'}")
        sys.stdout.flush()
    raise SystemExit(bool(survived))


if __name__ == "__main__":
    main()
