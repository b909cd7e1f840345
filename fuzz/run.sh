#!/usr/bin/env bash
# Fuzzes every target for an equal share of CPU_MINUTES, one minute at a time, at the lowest priority:
#
#     fuzz/run.sh CPU_MINUTES [TARGET...]
#
# Builds the targets first (needs cargo-fuzz and a nightly toolchain), or takes them from the directory FUZZ_BUILT.
# Writes new inputs to fuzz/grown/, failing inputs to fuzz/artifacts/, and a line for each minute to fuzz/grown/log.tsv:
# target, CPU seconds, executions, coverage, exit code. A target with a failure is not run again. The script can be
# stopped and restarted at any time: the log keeps the minutes.
set -euo pipefail
cd "$(dirname "$0")"

wanted_s=$((${1:?minutes of CPU in all} * 60))
shift
targets=("$@")
[ ${#targets[@]} -gt 0 ] || mapfile -t targets < <(cd fuzz_targets && ls -- *.rs | sed 's/\.rs$//')
[ -n "${FUZZ_BUILT:-}" ] || cargo +nightly fuzz build -O
built=${FUZZ_BUILT:-target/x86_64-unknown-linux-gnu/release}
mkdir -p grown artifacts
log=grown/log.tsv
touch "$log"

# Prints the total CPU seconds so far, and the target without failure that has had the least.
next() {
    printf '%s\n' "${targets[@]}" | awk -F '\t' '
        of == "log" { cpu[$1] += $2; if ($5 != 0) found[$1] = 1; next }
        { sum += cpu[$1]; if (!found[$1] && (best == "" || cpu[$1] < cpu[best])) best = $1 }
        END { printf "%d %s\n", sum, best }' of=log "$log" of=targets -
}

while read -r had target < <(next) && [ "$had" -lt "$wanted_s" ] && [ -n "$target" ]; do
    mkdir -p "grown/$target" "artifacts/$target"
    run=$(mktemp)
    code=0
    TIMEFORMAT='cpu %U %S'
    { time nice -n 19 "$built/$target" "grown/$target" "corpus/$target" "-dict=dictionaries/$target.dict" \
        -max_total_time=60 -timeout=20 -rss_limit_mb=2048 "-artifact_prefix=artifacts/$target/" \
        -print_final_stats=1; } >"$run" 2>&1 || code=$?
    cpu=$(awk '/^cpu / { printf "%.0f", $2 + $3 }' "$run")
    executions=$(awk '/number_of_executed_units/ { print $2 }' "$run")
    coverage=$(grep -o 'cov: [0-9]*' "$run" | tail -1 | cut -d' ' -f2 || true)
    printf '%s\t%s\t%s\t%s\t%s\n' "$target" "$cpu" "${executions:-?}" "${coverage:-?}" "$code" | tee -a "$log"
    [ "$code" -eq 0 ] || cp "$run" "artifacts/$target/last.log"
    rm -f "$run"
done
awk -F '\t' '{ cpu[$1] += $2; n[$1] += $3; if ($5 != 0) found[$1] = " FOUND" }
    END { for (t in cpu) { printf "%s: %d s, %d executions%s\n", t, cpu[t], n[t], found[t] } }' "$log" | sort
