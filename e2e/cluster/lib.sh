# What `run` and `ctl` share: a cluster lives in one directory, $cluster.
#
#   proc/NAME/{cmd,pid,log}   a process: how it is started, its id, what it says
#   NODE/                     a node: kubelet, containerd, driver root, CDI files
#
# Everything a test does to a process goes through `start` and `stop`, so a
# process that is killed is started again exactly as before.

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

# define NAME COMMAND...: how a process is started.
define() {
  local name=$1
  shift
  mkdir -p "$cluster/proc/$name"
  {
    printf '#!/usr/bin/env bash\nexport PATH=%q\n' "$PATH"
    printf 'exec'
    printf ' %q' "$@"
    printf '\n'
  } > "$cluster/proc/$name/cmd"
  chmod +x "$cluster/proc/$name/cmd"
}

# When a process was started, in ticks: with it, an id means one process for ever.
started() { # started PID
  cut -d' ' -f22 "/proc/$1/stat" 2> /dev/null || true
}

alive() {
  local pid
  pid=$(cat "$cluster/proc/$1/pid" 2>/dev/null) || return 1
  [ -n "$pid" ] && [ "$(started "$pid")" = "$(cat "$cluster/proc/$1/started" 2> /dev/null)" ] || return 1
  # A zombie has ended.
  grep -qsv '^State:[[:space:]]*Z' <(grep -s '^State' "/proc/$pid/status")
}

# own: this run is the owner of the cluster for as long as it lives.
own() { echo "$$ $(started $$)" > "$cluster/owner"; }

# A cluster whose run was killed is still there, bridges and all: it goes first.
# One that was kept, or whose run lives, is left to its owner.
sweep() { # sweep PREFIX
  local dir pid start
  for dir in "$1"*; do
    [ -d "$dir" ] && [ ! -e "$dir/kept" ] || continue
    pid='' start=''
    [ ! -e "$dir/owner" ] || read -r pid start < "$dir/owner" || true
    [ -z "$start" ] || [ "$(started "$pid")" != "$start" ] || continue
    say "a run of this ended without its end: $dir"
    cluster=$dir
    teardown
  done
}

start() {
  local dir=$cluster/proc/$1
  alive "$1" && return
  setsid "$dir/cmd" >> "$dir/log" 2>&1 < /dev/null &
  echo $! > "$dir/pid"
  started $! > "$dir/started"
  disown
}

# stop NAME [SIGNAL] [SECONDS]: after that many seconds it is killed.
stop() {
  local dir=$cluster/proc/$1 signal=${2:-TERM} patience=${3:-10} pid
  alive "$1" || return 0
  pid=$(cat "$dir/pid")
  kill "-$signal" "$pid" 2>/dev/null || true
  for _ in $(seq $((patience * 20))); do
    alive "$1" || { rm -f "$dir/pid"; return 0; }
    sleep 0.05
  done
  kill -KILL "$pid" 2>/dev/null || true
  for _ in $(seq 100); do alive "$1" || break; sleep 0.05; done
  rm -f "$dir/pid"
}

# wait_for WHAT SECONDS COMMAND...
wait_for() {
  local what=$1 seconds=$2
  shift 2
  local deadline=$((SECONDS + seconds))
  until "$@" > /dev/null 2>&1; do
    [ $SECONDS -lt $deadline ] || die "$what: not after $seconds s"
    sleep 0.1
  done
}

unmount_below() {
  local at
  for at in $(awk -v d="$1/" 'index($5, d) == 1 { print $5 }' /proc/self/mountinfo | tac); do
    umount -l "$at" 2> /dev/null || true
  done
}
