//! A container as far as a share is concerned: namespaces of its own, a root of its own, the pages and the library
//! mounted as a CDI file has them mounted, and no capability that a container has not got by default.
//!
//! No container runtime and no root are needed: `unshare` gives a user namespace whose root may mount. Its root file
//! system is this machine's, each top directory mounted again, with an `/etc` and a `/run` of its own. `/etc/ld.so.preload`
//! is a mounted file, so that the loader finds the library as it does in a pod: no environment is involved. Who waits in
//! it as process 1 is a shell; programs enter by `nsenter` and lose, before they run, what that root could do.

use crate::cdi::{self, Prepared};
use crate::cgroup::Cgroup;
use crate::node::{Node, Share};
use anyhow::{Context, Result, bail};
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// What a container's root may do by default (containerd's list): nothing that mounts, traces others or loads modules.
const CAPABILITIES: &str = "-all,+chown,+dac_override,+fsetid,+fowner,+mknod,+net_raw,+setgid,+setuid,+setfcap,\
                            +setpcap,+net_bind_service,+sys_chroot,+kill,+audit_write";

/// Where the library lies in a container.
const LIBRARY: &str = "/run/divvy/lib/libdivvy.so";

/// What a container is made of.
#[derive(Clone, Debug, Default)]
pub struct Recipe {
    pub shares: Vec<Share>,
    /// The library to preload.
    pub library: Option<PathBuf>,
    /// Shares, and the libraries for them, that are mounted as the driver's CDI files say.
    pub prepared: Vec<Prepared>,
    /// What its programs have in their environment, beside `PATH`.
    pub environment: Vec<(String, String)>,
    /// As root, without a user namespace: for programs that change their user.
    pub root: bool,
    /// In a cgroup of its own, which the node knows of: for limits that the GPU driver keeps.
    pub cgroup: bool,
    /// Shell that runs before the root is changed to `/mnt`, as the root that mounts: a pod's own volumes.
    pub volumes: String,
}

/// A running container; it ends, with all its processes, when it is dropped.
#[derive(Debug)]
pub struct Container {
    outer: Child,
    /// Process 1, as this process numbers it.
    pub first: u32,
    root: bool,
    environment: Vec<(String, String)>,
    /// Its processes leave it when they die with this.
    pub cgroup: Option<Cgroup>,
}

impl Container {
    pub fn start(node: &Node, recipe: &Recipe) -> Result<Self> {
        let cgroup = if recipe.cgroup { Some(Cgroup::make()?) } else { None };
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
        if let Some(said) = outer.stdout.take() {
            BufReader::new(said).read_line(&mut line)?;
        }
        if line != "up\n" {
            // It has ended, or is of no use.
            let _ = outer.kill();
            let mut why = String::new();
            if let Some(mut said) = outer.stderr.take() {
                said.read_to_string(&mut why)?;
            }
            let _ = outer.wait();
            bail!("no container here (user namespaces are needed): {}", why.trim());
        }
        let id = outer.id();
        let children = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children"))?;
        let first: u32 = children.trim().parse().context("the container has no process 1")?;
        if let Some(cgroup) = &cgroup {
            std::fs::write(cgroup.processes(), first.to_string())?;
            let prepared = recipe.prepared.iter().map(|prepared| &prepared.share);
            for share in recipe.shares.iter().chain(prepared) {
                share.tell_container(cgroup.name(), &cgroup.line())?;
            }
        }
        Ok(Self { outer, first, root: recipe.root, environment: recipe.environment.clone(), cgroup })
    }

    /// A program in the container, as a tenant of it.
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
        // Its process 1 dies with it, and so does whatever lives there.
        let _ = self.outer.kill();
        let _ = self.outer.wait();
    }
}

/// What makes the container; its last line stays as process 1 until its standard input ends.
fn script(node: &Node, recipe: &Recipe) -> Result<String> {
    let mut script = String::from(
        "set -e\n\
         mount --make-rprivate /\n\
         mount -t tmpfs -o mode=755 tmpfs /mnt\n\
         for entry in /*; do\n\
         \x20 name=${entry#/}\n\
         \x20 case $name in etc | run | proc | mnt | tmp | lost+found) continue ;; esac\n\
         \x20 if [ -L $entry ]; then cp -P $entry /mnt/; elif [ -d $entry ]; then mkdir -p /mnt/$name; mount --rbind $entry /mnt/$name; fi\n\
         done\n\
         mkdir -p /mnt/etc /mnt/run/divvy /mnt/proc /mnt/mnt /mnt/tmp\n\
         cp -a /etc/. /mnt/etc/ 2>/dev/null || true\n\
         rm -f /mnt/etc/ld.so.preload\n\
         mount -t proc proc /mnt/proc\n\
         for place in $(grep -o ' /mnt/sys/fs/cgroup[^ ]* cgroup2* ' /proc/self/mounts | cut -d' ' -f2); do\n\
         \x20 mount -o remount,bind,ro,nosuid,nodev,noexec $place\n\
         done\n\
         bind() { mkdir -p $(dirname $2); [ -e $2 ] || touch $2; mount --bind $1 $2; mount -o remount,bind,$3 $2; }\n",
    );
    script += &format!("cp {} /mnt/etc/ld.so.cache\n", text(&node.loader_cache()?)?);
    // Of the host's temporary files only what a container has too: the driver, and the programs.
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
    script += "\ncd /mnt\nmkdir .old\npivot_root . .old\numount -l /.old\nrmdir /.old\necho up\nwhile read -r line; do :; done\n";
    Ok(script)
}

/// A `/dev` with the GPU's nodes, and where the simulator's state is: a driver's library that is not below the driver's
/// root takes `/` for it.
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

/// No library of the driver's but those that are mounted, and what programs have put beside them.
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
    text.map(str::to_owned)
        .with_context(|| format!("{} is no path for a shell", OsString::from(path).display()))
}
