# Functions for `run` and `ctl`. All files of a cluster are in one directory, $cluster.
#
#   proc/NAME/{cmd,pid,log}   a process: its command, its id, its output
#   NODE/                     a node: kubelet, containerd, driver root, CDI files
#
# Tests start and stop processes only by `start` and `stop`, so that a killed process is started
# again with the same command.

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

# define NAME COMMAND...: defines the command of a process.
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

# The start time of a process, in clock ticks. Together with the id it identifies a process uniquely.
started() { # started PID
  cut -d' ' -f22 "/proc/$1/stat" 2> /dev/null || true
}

alive() {
  local pid
  pid=$(cat "$cluster/proc/$1/pid" 2>/dev/null) || return 1
  [ -n "$pid" ] && [ "$(started "$pid")" = "$(cat "$cluster/proc/$1/started" 2> /dev/null)" ] || return 1
  # A zombie counts as ended.
  grep -qsv '^State:[[:space:]]*Z' <(grep -s '^State' "/proc/$pid/status")
}

# own: marks this run as the owner of the cluster for its lifetime.
own() { echo "$$ $(started $$)" > "$cluster/owner"; }

# Takes down clusters whose run was killed, with their bridges. Clusters that were kept, or whose run is alive, stay.
sweep() { # sweep PREFIX
  local dir pid start
  for dir in "$1"*; do
    [ -d "$dir" ] && [ ! -e "$dir/kept" ] || continue
    pid='' start=''
    [ ! -e "$dir/owner" ] || read -r pid start < "$dir/owner" || true
    [ -z "$start" ] || [ "$(started "$pid")" != "$start" ] || continue
    say "taking down the cluster of a killed run: $dir"
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

# stop NAME [SIGNAL] [SECONDS]: sends the signal, and SIGKILL after that many seconds.
stop() {
  local dir=$cluster/proc/$1 signal=${2:-TERM} timeout=${3:-10} pid
  alive "$1" || return 0
  pid=$(cat "$dir/pid")
  kill "-$signal" "$pid" 2>/dev/null || true
  for _ in $(seq $((timeout * 20))); do
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
    [ $SECONDS -lt $deadline ] || die "timeout after $seconds s: $what"
    sleep 0.1
  done
}

unmount_below() {
  local at
  for at in $(awk -v d="$1/" 'index($5, d) == 1 { print $5 }' /proc/self/mountinfo | tac); do
    umount -l "$at" 2> /dev/null || true
  done
}
