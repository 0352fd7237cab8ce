#!/bin/sh
# Every test, with a sample of the long campaigns. At the end the ten slowest, and the time of the whole.
set -u
cd "$(dirname "$0")/.."
cargo=${CARGO:-cargo}
# Tests run in other folders.
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
began=$(date +%s)
DSYNC_TEST_TIMES=$target/test-times
export DSYNC_TEST_TIMES
rm -f "$DSYNC_TEST_TIMES"

# The command too: a test of what a user does would build it, and its time would be the test's. All at once, so that no core waits for the
# command while there are tests to be built. Here and below the whole workspace: of a part of it cargo would choose other features, and build anew.
"$cargo" build --workspace --bin dsync --tests || exit
built=$(date +%s)
# What a user does mostly waits, for a disk, a link or a guest; what the crates say of themselves mostly computes: the one beside the other.
export DSYNC_BIN="$target/debug/dsync"
named=$(ls crates/*/tests/*.rs crates/*/tests/*/main.rs | sed -E 's:/main\.rs$::; s:.*/::; s:\.rs$::; s:^:--test :' | sort -u)
# What is left of their temporary files when they are killed is removed by the next run, as all that has such a name.
temporary=${TMPDIR:-/tmp}/dsync-test-$(stat -Lc %i /proc/self/ns/pid)_$$-
mkdir -p "$temporary"
# Each test has its own limit; this one is for what hangs without being a test.
# shellcheck disable=SC2016,SC2086
TMPDIR=$temporary RUST_TEST_THREADS=${RUST_TEST_THREADS:-$(nproc)} setsid timeout 7200 sh -c '
    "$0" test --no-fail-fast --workspace --lib --bins "$@"; code=$?
    "$0" test --no-fail-fast --workspace --doc || code=$?
    exit $code' "$cargo" $named >"$target/test-log-crates" 2>&1 &
crates=$!
trap 'kill -- -$crates 2>/dev/null; rm -rf "$temporary"' EXIT
trap 'exit 1' HUP INT TERM
export RUST_TEST_THREADS="${RUST_TEST_THREADS:-$(($(nproc) + 1))}"
{ timeout 7200 "$cargo" test --no-fail-fast --workspace --test user 2>&1; echo $? >"$target/test-code"; } | tee "$target/test-log"
wait $crates
code=$?
cat "$target/test-log-crates"
[ "$(cat "$target/test-code")" = 0 ] || code=1
# Again at the end, where it is found, and where a log that was cut still has it.
if [ "$code" != 0 ]; then
    echo 'What failed:'
    grep -ah -A8 -e ' panicked at ' -e '^DSYNC_SEED=' -e ' hangs' "$target/test-log" "$target/test-log-crates" | head -n 100
fi
echo 'The slowest tests, in seconds:'
sort -rn "$DSYNC_TEST_TIMES" | head -n 10
now=$(date +%s)
echo "built in $((built - began)) s, tested in $((now - built)) s"
exit $code
