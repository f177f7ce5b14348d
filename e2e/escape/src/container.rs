//! A container as a pod with a share gets it: its own namespaces and root, the pages and the
//! library mounted as by a CDI file, and the default capabilities.
//!
//! No container runtime and no root are needed: `unshare` creates a user namespace whose root may
//! mount. The root file system is the machine's, each top directory bind-mounted, with a separate
//! `/etc` and `/run`. `/etc/ld.so.preload` is a mounted file, so the loader finds the library
//! without any environment variable, as in a pod. Process 1 is a waiting shell; programs enter by
//! `nsenter` and drop the capabilities of that root before they run.

use crate::cdi::{self, Prepared};
use crate::cgroup::Cgroup;
use crate::node::{Node, Share};
use anyhow::{Context, Result, bail};
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// The default capabilities of a container's root (containerd's list): none to mount, trace others
/// or load modules.
const CAPABILITIES: &str = "-all,+chown,+dac_override,+fsetid,+fowner,+mknod,+net_raw,+setgid,+setuid,\
                            +setfcap,+setpcap,+net_bind_service,+sys_chroot,+kill,+audit_write";

/// The path of the library in a container.
const LIBRARY: &str = "/run/divvy/lib/libdivvy.so";

/// The parts of a container.
#[derive(Clone, Debug, Default)]
pub struct Recipe {
    pub shares: Vec<Share>,
    /// The library to preload.
    pub library: Option<PathBuf>,
    /// Shares and their libraries, mounted as the driver's CDI files say.
    pub prepared: Vec<Prepared>,
    /// The environment of its programs, in addition to `PATH`.
    pub environment: Vec<(String, String)>,
    /// Run as root without a user namespace, for programs that change their user.
    pub root: bool,
    /// Create a cgroup that the node knows, for limits that the GPU driver enforces.
    pub cgroup: bool,
    /// Shell commands that run as the mounting root before the root changes to `/mnt`: the pod's
    /// volumes.
    pub volumes: String,
}

/// A running container. It ends with all its processes when it is dropped.
#[derive(Debug)]
pub struct Container {
    outer: Child,
    /// Process 1, by its id in this process's pid namespace.
    pub first: u32,
    root: bool,
    environment: Vec<(String, String)>,
    /// Dropped after the container's processes have ended, which removes them from it.
    pub cgroup: Option<Cgroup>,
}

impl Container {
    pub fn start(node: &Node, recipe: &Recipe) -> Result<Self> {
        let cgroup = if recipe.cgroup { Some(Cgroup::create()?) } else { None };
        let user: &[&str] = if recipe.root { &[] } else { &["--user", "--map-root-user"] };
        let mut outer = Command::new("unshare")
            .args(user)
            .args(["--mount", "--pid", "--fork", "--kill-child", "--", "sh", "-c", &script(node, recipe)?])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("cannot start unshare")?;
        let mut line = String::new();
        if let Some(stdout) = outer.stdout.take() {
            BufReader::new(stdout).read_line(&mut line)?;
        }
        if line != "up\n" {
            // It has ended, or is unusable.
            let _ = outer.kill();
            let mut why = String::new();
            if let Some(mut stderr) = outer.stderr.take() {
                stderr.read_to_string(&mut why)?;
            }
            let _ = outer.wait();
            bail!("cannot create a container (user namespaces are needed): {}", why.trim());
        }
        let id = outer.id();
        let children = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children"))?;
        let first: u32 = children.trim().parse().context("the container has no process 1")?;
        if let Some(cgroup) = &cgroup {
            std::fs::write(cgroup.processes(), first.to_string())?;
            let prepared = recipe.prepared.iter().map(|prepared| &prepared.share);
            for share in recipe.shares.iter().chain(prepared) {
                share.register_container(cgroup.name(), &cgroup.line())?;
            }
        }
        Ok(Self { outer, first, root: recipe.root, environment: recipe.environment.clone(), cgroup })
    }

    /// A command that runs a program in the container as a tenant.
    pub fn command(&self, program: &Path) -> Command {
        let mut command = match &self.cgroup {
            Some(cgroup) => {
                let mut shell = Command::new("sh");
                shell.args(["-c", r#"echo $$ > "$0" && exec "$@""#]).arg(cgroup.processes()).arg("nsenter");
                shell
            }
            None => Command::new("nsenter"),
        };
        command.args(["--target", &self.first.to_string(), "--mount", "--pid"]);
        if !self.root {
            command.args(["--user", "--preserve-credentials"]);
        }
        command.args(["--", "setpriv", "--inh-caps=-all", &format!("--bounding-set={CAPABILITIES}")]);
        command
            .args(["env", "-i", "HOME=/root"])
            .arg(format!("PATH={}", std::env::var("PATH").unwrap_or_default()))
            .args(self.environment.iter().map(|(name, value)| format!("{name}={value}")))
            .arg(program);
        command
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        // Process 1 of the container dies with it, and with that every process in it.
        let _ = self.outer.kill();
        let _ = self.outer.wait();
    }
}

/// The shell script that sets up the container. Its last line stays as process 1 until standard
/// input ends.
fn script(node: &Node, recipe: &Recipe) -> Result<String> {
    let mut script = String::from(
        "set -e\n\
         mount --make-rprivate /\n\
         mount -t tmpfs -o mode=755 tmpfs /mnt\n\
         for entry in /*; do\n\
         \x20 name=${entry#/}\n\
         \x20 case $name in etc | run | proc | mnt | tmp | lost+found) continue ;; esac\n\
         \x20 if [ -L $entry ]; then cp -P $entry /mnt/;\n\
          \x20 elif [ -d $entry ]; then mkdir -p /mnt/$name; mount --rbind $entry /mnt/$name; fi\n\
         done\n\
         mkdir -p /mnt/etc /mnt/run/divvy /mnt/proc /mnt/mnt /mnt/tmp\n\
         cp -a /etc/. /mnt/etc/ 2>/dev/null || true\n\
         rm -f /mnt/etc/ld.so.preload\n\
         mount -t proc proc /mnt/proc\n\
         for place in $(grep -o ' /mnt/sys/fs/cgroup[^ ]* cgroup2* ' /proc/self/mounts | cut -d' ' -f2); do\n\
         \x20 mount -o remount,bind,ro,nosuid,nodev,noexec $place\n\
         done\n\
         bind() {\n\
         \x20 mkdir -p $(dirname $2); [ -e $2 ] || touch $2\n\
         \x20 mount --bind $1 $2; mount -o remount,bind,$3 $2\n\
         }\n",
    );
    script += &format!("cp {} /mnt/etc/ld.so.cache\n", text(&node.loader_cache()?)?);
    // The container gets none of the host's temporary files except the driver and the programs.
    for directory in [node.sim.root(), &node.programs()] {
        let directory = text(directory)?;
        script += &format!("mkdir -p /mnt{directory}\nmount --rbind {directory} /mnt{directory}\n");
    }
    for share in &recipe.shares {
        let (from, to) = (text(&share.directory)?, format!("/mnt/run/divvy/{}/{}", share.claim, share.id));
        script += &format!("bind {from}/account {to}/account rw,nosuid,nodev,noexec\n");
        script += &format!("bind {from}/policy {to}/policy ro,nosuid,nodev,noexec\n");
    }
    if let Some(library) = &recipe.library {
        script += &format!("bind {} /mnt{LIBRARY} ro,nosuid,nodev\n", text(library)?);
        script += &format!(
            "bind {} /mnt/etc/ld.so.preload ro,nosuid,nodev,noexec\n",
            text(&node.preload(LIBRARY)?)?
        );
    }
    if !recipe.prepared.is_empty() {
        script += &devices(node)?;
        script += &libraries(node)?;
    }
    for mount in cdi::mounts(node, &recipe.prepared)? {
        let (host, container) = (text(&mount.host)?, text(&mount.container)?);
        script += &format!("bind {host} /mnt{container} {}\n", mount.options);
    }
    script += &recipe.volumes;
    script += "\ncd /mnt\nmkdir .old\npivot_root . .old\numount -l /.old\nrmdir /.old\n\
               echo up\nwhile read -r line; do :; done\n";
    Ok(script)
}

/// Mounts a `/dev` with the GPU's nodes, and the simulator's state where a driver library that is
/// not below the driver's root looks for it.
fn devices(node: &Node) -> Result<String> {
    let (state, dev) = (text(node.sim.dir())?, text(&node.sim.dev())?);
    Ok(format!(
        "mkdir -p /mnt/run/divvy-sim\nmount --rbind {state} /mnt/run/divvy-sim\n\
         mount -t tmpfs -o mode=755 tmpfs /mnt/dev\n\
         for entry in /dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty {dev}/nvidia*; do\n\
         \x20 at=/mnt/dev/${{entry##*/}}\n\
         \x20 if [ -d $entry ]; then mkdir $at; else touch $at; fi\n\
         \x20 mount --rbind $entry $at\n\
         done\n"
    ))
}

/// Hides the driver's libraries except those that are mounted and the programs' own copies.
fn libraries(node: &Node) -> Result<String> {
    let directory = text(&node.libraries())?;
    Ok(format!(
        "mount -t tmpfs -o mode=755 tmpfs /mnt{directory}\n\
         for name in static libmycu.so; do\n\
         \x20 if [ -e {directory}/$name ]; then bind {directory}/$name /mnt{directory}/$name ro; fi\n\
         done\n"
    ))
}

fn text(path: &Path) -> Result<String> {
    let text = path.to_str().filter(|path| !path.contains(|c: char| c.is_whitespace() || c == '\''));
    text.map(str::to_owned).with_context(|| {
        format!("the path {} cannot be used in a shell script", OsString::from(path).display())
    })
}
