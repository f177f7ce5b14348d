//! Real processes that act as processes of containers with a share. Their cgroup and mounts are written
//! to the test's `/proc`, because a test without root privileges cannot create them.

use crate::programs::program;
use divvy_pages::Identity;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// A process that allocates memory of the first GPU without the library.
pub(crate) struct Tenant {
    child: Child,
}

impl Tenant {
    pub(crate) fn start(root: &Path, mib: u64) -> Self {
        let mut command = Command::new(program("divvy-sim"));
        command.arg("-C").arg(root).args(["client", "--memory", &mib.to_string()]);
        command.env_clear().stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        // It prints its pid once it has the memory.
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.contains(&format!("\"pid\":{}", child.id())), "{line}");
        Self { child }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Creates its directory in the test's `/proc`, with these cgroups and mounts.
    pub(crate) fn set_proc(&self, proc_root: &Path, cgroup: &str, mounts: &str) {
        let pid = self.pid();
        let dir = proc_root.join(pid.to_string());
        fs::create_dir_all(&dir).unwrap();
        for name in ["stat", "status", "ns"] {
            symlink(format!("/proc/{pid}/{name}"), dir.join(name)).unwrap();
        }
        fs::write(dir.join("cgroup"), cgroup).unwrap();
        self.set_mounts(proc_root, mounts);
    }

    /// Replaces its mounts in the test's `/proc`.
    pub(crate) fn set_mounts(&self, proc_root: &Path, mounts: &str) {
        fs::write(proc_root.join(self.pid().to_string()).join("mountinfo"), mounts).unwrap();
    }

    /// The identity that the process writes to an account page.
    pub(crate) fn identity(&self) -> Identity {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid())).unwrap();
        let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_ascii_whitespace().collect();
        let namespace = fs::read_link(format!("/proc/{}/ns/pid", self.pid())).unwrap();
        let namespace =
            namespace.to_str().unwrap().trim_matches(|c: char| !c.is_ascii_digit()).parse().unwrap();
        let field = |number: usize| fields[number - 3].parse().unwrap();
        Identity { pid: self.pid(), namespace, start: field(22), image: field(28) }
    }

    pub(crate) fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Tenant {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The `mountinfo` of a container with this share: its root and the two pages. `dir` is the directory
/// of the pages.
pub(crate) fn mounts(dir: &Path, claim: &str, share: &str) -> String {
    let device = fs::metadata(dir.join("policy")).unwrap().dev();
    let device = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    let line = |(id, file, options): (u32, &str, &str)| {
        let inside = format!("{claim}/{share}/{file}");
        format!("{id} 1 {device} /x/shares/{inside} /run/divvy/{inside} {options} - tmpfs t rw\n")
    };
    ROOT.to_owned() + &line((2, "policy", "ro")) + &line((3, "account", "rw"))
}

/// The root mount of a container.
pub(crate) const ROOT: &str = "1 0 0:50 / / rw - overlay overlay rw\n";

/// A mount of another file over the policy page.
pub(crate) fn mount_over(claim: &str, share: &str) -> String {
    format!("9 2 0:77 /x /run/divvy/{claim}/{share}/policy rw - tmpfs t rw\n")
}
