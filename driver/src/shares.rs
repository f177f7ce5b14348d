//! The pages of shares on the host: what each may use, and what it does use.
//!
//! ```text
//! <run dir>/shares/<claim UID>/<shareID>/policy      what the share may use; root's, 0444
//!                                        account     what it does use; its processes write it, 0666
//!                                        cgroups/    of its containers, by container id (the hook's)
//!                                        preload/    lists of libraries, by container id (the hook's)
//!                                        told        is there while the claim's status says that something is wrong
//! ```
//!
//! One pair of pages is one (claim, shareID) and names one device. Containers have
//! the two files mounted, each by itself, so that no directory of the host is open
//! to anybody who writes an account: the directories are root's alone. In memory: a
//! reboot takes them with every process that they count, and they are made again
//! from the records.
//!
//! Processes live longer than the daemon. A page that is there is never replaced
//! by another file, which containers would not see: an account that is there stays
//! whatever it says, and a policy is changed in place, in the copy that is not
//! read (see [`divvy_pages::policy`]).

mod contexts;
mod mapped;
pub mod policy;

use crate::paths::HostPaths;
pub(crate) use contexts::Contexts;
use divvy_api::{ClaimUid, ShareId};
use divvy_pages::policy::{PolicyError, SIZE};
use divvy_pages::{Flags, Memory, Policy, account};
pub(crate) use mapped::Mapped;
use rustix::fs::OFlags;
use rustix::thread::futex;
use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

/// Where containers see the pages of their shares.
pub const IN_CONTAINER: &str = "/run/divvy";
/// Of the run directory.
const DIRECTORY: &str = "shares";
pub const POLICY: &str = "policy";
pub const ACCOUNT: &str = "account";
pub const CGROUPS: &str = "cgroups";
pub const PRELOAD: &str = "preload";
const TOLD: &str = "told";
/// The hook's files are a line or a few; nobody but root can make them larger.
const LARGEST: u64 = 64 << 10;

/// Why pages are not as they must be.
#[derive(Debug, thiserror::Error)]
pub enum PagesError {
    #[error("share {share:?} of claim {claim:?} cannot name a directory")]
    Name { claim: String, share: String },
    #[error("{path} cannot be written")]
    Write {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("{path} cannot be removed")]
    Remove {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("policy page {path} cannot be changed in place")]
    Change {
        path: PathBuf,
        #[source]
        cause: PolicyError,
    },
}

/// The pages of all shares; a clone is the same.
#[derive(Clone, Debug)]
pub struct Shares {
    dir: PathBuf,
}

impl Shares {
    pub fn new(paths: &HostPaths) -> Self {
        Self { dir: paths.run_dir.join(DIRECTORY) }
    }

    /// The directory of all shares.
    pub(crate) fn root(&self) -> &Path {
        &self.dir
    }

    /// The directory of a share.
    pub fn of(&self, claim: &ClaimUid, share: &ShareId) -> PathBuf {
        self.dir.join(claim.as_str()).join(share.as_str())
    }

    /// Claims that have pages, by UID.
    pub fn claims(&self) -> Vec<ClaimUid> {
        let entries = fs::read_dir(&self.dir).into_iter().flatten().flatten();
        entries.filter_map(|entry| Some(entry.file_name().into_string().ok()?.into())).collect()
    }

    /// All shares that have pages, or a directory for them.
    pub fn all(&self) -> Vec<(ClaimUid, ShareId)> {
        let of_claim = |claim: ClaimUid| {
            let entries = fs::read_dir(self.dir.join(claim.as_str())).into_iter().flatten().flatten();
            let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
            names.map(|name| (claim.clone(), ShareId::from(name))).collect::<Vec<_>>()
        };
        self.claims().into_iter().flat_map(of_claim).collect()
    }

    /// Has the pages be there, and the policy be this; says whether anything had to be done.
    /// The GPU's lock makes us the only writer of the policy.
    pub fn write(&self, claim: &ClaimUid, share: &ShareId, policy: &Policy) -> Result<bool, PagesError> {
        if [claim.as_str(), share.as_str()].into_iter().any(|name| !is_file_name(name)) {
            let (claim, share) = (claim.to_string(), share.to_string());
            return Err(PagesError::Name { claim, share });
        }
        let dir = self.of(claim, share);
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |cause| PagesError::Write { path, cause }
        };
        for name in [CGROUPS, PRELOAD] {
            let path = dir.join(name);
            if !path.is_dir() {
                DirBuilder::new().recursive(true).mode(0o700).create(&path).map_err(failed(&path))?;
            }
        }
        let path = dir.join(ACCOUNT);
        let is_there = path.metadata().is_ok_and(|meta| meta.len() == account::SIZE as u64);
        if !is_there {
            // One that was cut short is mounted where it was cut.
            let written = match path.exists() {
                true => renew(&path),
                false => create(&path, &fresh_account(), 0o666),
            };
            written.map_err(failed(&path))?;
        }
        let path = dir.join(POLICY);
        let changed = match read(&path) {
            Ok(page) => change(&path, &page, policy)?,
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => {
                create(&path, &policy.encode(), 0o444).map_err(failed(&path))?;
                true
            }
            Err(cause) => return Err(failed(&path)(cause)),
        };
        Ok(changed || !is_there)
    }

    /// Whether [`Self::write`] would have nothing to do.
    pub fn is_written(&self, claim: &ClaimUid, share: &ShareId, policy: &Policy) -> bool {
        let dir = self.of(claim, share);
        let length = account::SIZE as u64;
        dir.join(ACCOUNT).metadata().is_ok_and(|meta| meta.len() == length)
            && read(&dir.join(POLICY)).is_ok_and(|page| says(&page, policy) == Ok(true))
    }

    /// Asks a share's processes to give back what their pools keep without use.
    pub fn trim(&self, claim: &ClaimUid, share: &ShareId) -> io::Result<()> {
        let mapped = Mapped::open(&self.of(claim, share).join(POLICY))?;
        let word = mapped.page().ok_or(io::ErrorKind::InvalidData)?.trim();
        word.fetch_add(1, Ordering::SeqCst);
        futex::wake(word, futex::Flags::empty(), i32::MAX as u32)?;
        Ok(())
    }

    /// Removes the pages of a claim; what is not there is fine.
    pub fn remove(&self, claim: &ClaimUid) -> Result<(), PagesError> {
        if !is_file_name(claim.as_str()) {
            return Ok(());
        }
        let path = self.dir.join(claim.as_str());
        match fs::remove_dir_all(&path) {
            Err(cause) if !matches!(cause.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                Err(PagesError::Remove { path, cause })
            }
            _ => Ok(()),
        }
    }

    /// Shares of which the claim's status says that something is wrong.
    pub fn told(&self) -> Vec<(ClaimUid, ShareId)> {
        let is_told = |(claim, share): &(ClaimUid, ShareId)| self.of(claim, share).join(TOLD).exists();
        self.all().into_iter().filter(is_told).collect()
    }

    /// Remembers whether it does.
    pub fn tell(&self, claim: &ClaimUid, share: &ShareId, wrong: bool) -> io::Result<()> {
        let path = self.of(claim, share).join(TOLD);
        match wrong {
            true => fs::write(path, ""),
            false => fs::remove_file(path),
        }
    }

    /// The bytes that a share has by its own account, which its processes write; none
    /// where there is no such account.
    pub fn used(&self, claim: &ClaimUid, share: &ShareId) -> Option<u64> {
        let mut header = [0; account::HEADER];
        let file = open(&self.of(claim, share).join(ACCOUNT), false).ok()?;
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut header, 0).ok()?;
        account::Snapshot::new(&header).ok().map(|page| page.used())
    }

    /// The containers of a share that the hook told of: id, and what `/proc/<pid>/cgroup`
    /// said of the first process.
    pub fn cgroups(&self, claim: &ClaimUid, share: &ShareId) -> Vec<(String, String)> {
        let entries = fs::read_dir(self.of(claim, share).join(CGROUPS)).into_iter().flatten().flatten();
        let told = |entry: fs::DirEntry| {
            let id = entry.file_name().into_string().ok().filter(|id| is_file_name(id))?;
            let small = entry.metadata().ok()?.len() <= LARGEST;
            small.then(|| Some((id, fs::read_to_string(entry.path()).ok()?)))?
        };
        let mut containers: Vec<_> = entries.filter_map(told).collect();
        containers.sort();
        containers
    }
}

/// Makes an account new in the file that is there. Where a container has a lease on it that is for the agent, later.
fn renew(path: &Path) -> io::Result<()> {
    match open(path, true) {
        Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => Ok(()),
        file => {
            let account = fresh_account();
            let file = file?;
            file.set_len(account.len() as u64)?;
            file.write_all_at(&account, 0)
        }
    }
}

fn fresh_account() -> Vec<u8> {
    let mut page = account::fresh().to_vec();
    page.resize(account::SIZE, 0);
    page
}

/// Whether some process on the host still has pages of the claim mounted.
pub fn is_mounted(proc_root: &Path, claim: &ClaimUid) -> bool {
    let part = format!("/{DIRECTORY}/{claim}/");
    let entries = fs::read_dir(proc_root).into_iter().flatten().flatten();
    let processes =
        entries.filter(|entry| entry.file_name().as_encoded_bytes().iter().all(u8::is_ascii_digit));
    // Line by line: a container may have a hundred thousand mounts, with names of any bytes.
    let mut lines = processes
        .filter_map(|process| File::open(process.path().join("mountinfo")).ok())
        .flat_map(|mounts| BufReader::new(mounts).split(b'\n').map_while(Result::ok));
    lines.any(|line| {
        // The fourth field is where in its file system the mount begins.
        let root = line.split(|byte| *byte == b' ').nth(3).map(String::from_utf8_lossy);
        root.is_some_and(|root| root.contains(&part))
    })
}

/// Whether a page says that policy. What the agent has put there is its own.
fn says(page: &[u8], wanted: &Policy) -> Result<bool, PolicyError> {
    let (_, have) = Policy::decode(page)?;
    Ok(have == kept(wanted, &have))
}

/// The policy with what the agent decides as it stands on the page.
fn kept(wanted: &Policy, have: &Policy) -> Policy {
    let native = Flags(have.flags.0 & Flags::NATIVE_MEMORY.0);
    // Contexts that were charged by it are known by that: nothing is gained by another one.
    let memory = Memory { context: have.memory.context, ..wanted.memory };
    Policy { flags: wanted.flags.with(native), memory, ..*wanted }
}

/// Changes a page that may be mounted; says whether it had to be.
fn change(path: &Path, page: &[u8], wanted: &Policy) -> Result<bool, PagesError> {
    let failed = |cause| PagesError::Change { path: path.to_owned(), cause };
    let have = match Policy::decode(page) {
        Ok((_, have)) => have,
        // Nobody can have gone by it, and nobody but root can have written it.
        Err(_) => {
            let written = fs::write(path, wanted.encode());
            return written
                .map(|()| true)
                .map_err(|cause| PagesError::Write { path: path.to_owned(), cause });
        }
    };
    let wanted = kept(wanted, &have);
    if have == wanted {
        return Ok(false);
    }
    let replaced = Mapped::open(path).map_err(|cause| PagesError::Write { path: path.to_owned(), cause })?;
    replaced.page().map_or(Err(PolicyError::Foreign), |page| page.replace(&wanted)).map_err(failed)?;
    tracing::info!(path = %path.display(), "policy of a share changed in place");
    Ok(true)
}

/// Opens a page, or fails with `WouldBlock`: the root of a container may have taken a lease
/// on it (`F_SETLEASE`), and nobody waits for a tenant to give that back.
pub(crate) fn open(path: &Path, write: bool) -> io::Result<File> {
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    File::options().read(true).write(write).custom_flags(flags).open(path)
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut page = Vec::with_capacity(SIZE);
    open(path, false)?.read_to_end(&mut page)?;
    Ok(page)
}

/// Puts a file at `path` at once.
fn create(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let part = path.with_extension("part");
    fs::write(&part, bytes)
        // Not by creation: the umask would take a part of it.
        .and_then(|()| fs::set_permissions(&part, Permissions::from_mode(mode)))
        .and_then(|()| fs::rename(&part, path))
        // What is left over would only take space; the first error is the one to tell.
        .inspect_err(|_| drop(fs::remove_file(&part)))
}

/// Whether a text from outside can name a file: no path, nothing hidden.
fn is_file_name(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    !text.is_empty() && text.len() <= 64 && !text.starts_with('.') && text.chars().all(plain)
}

#[cfg(test)]
mod tests {
    use super::*;
    use divvy_pages::{Compute, Text};

    struct World {
        dir: tempfile::TempDir,
        shares: Shares,
    }

    impl World {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            Self { shares: Shares::new(&HostPaths::below(dir.path())), dir }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.shares.of(&claim(), &"s".into()).join(name)
        }

        fn write(&self, policy: &Policy) -> bool {
            let changed = self.shares.write(&claim(), &"s".into(), policy).unwrap();
            assert!(self.shares.is_written(&claim(), &"s".into(), policy));
            changed
        }

        fn read(&self) -> (u64, Policy) {
            Policy::decode(&fs::read(self.path(POLICY)).unwrap()).unwrap()
        }
    }

    fn claim() -> ClaimUid {
        "c".into()
    }

    fn policy(limit: u64) -> Policy {
        Policy {
            claim: Text::new("c").unwrap(),
            share: Text::new("s").unwrap(),
            gpu: divvy_pages::GpuUuid([1; 16]),
            mig: None,
            pci: Text::EMPTY,
            memory: Memory { limit, ..Memory::default() },
            compute: Compute::default(),
            codec: Default::default(),
            flags: Flags::STRICT,
        }
    }

    fn mode(path: &Path) -> u32 {
        path.metadata().unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn pages_are_made_for_containers_and_hidden_from_everybody_else() {
        let world = World::new();
        assert!(!world.shares.is_written(&claim(), &"s".into(), &policy(1)));
        assert!(world.write(&policy(1)));
        assert_eq!(world.read(), (1, policy(1)));
        assert_eq!((mode(&world.path(POLICY)), mode(&world.path(ACCOUNT))), (0o444, 0o666));
        for dir in ["run/shares", "run/shares/c", "run/shares/c/s", "run/shares/c/s/cgroups"] {
            assert_eq!(mode(&world.dir.path().join(dir)), 0o700, "{dir}");
        }
        let account = fs::read(world.path(ACCOUNT)).unwrap();
        assert_eq!(account.len(), account::SIZE);
        assert_eq!(account::Snapshot::new(&account).unwrap().used(), 0);
        assert_eq!(world.shares.claims(), [claim()]);
        world.shares.remove(&claim()).unwrap();
        world.shares.remove(&claim()).unwrap();
        assert!(world.shares.claims().is_empty());
    }

    #[test]
    fn an_account_in_use_is_never_touched() {
        let world = World::new();
        world.write(&policy(1));
        let mut account = fs::read(world.path(ACCOUNT)).unwrap();
        account[5000] = 7;
        fs::write(world.path(ACCOUNT), &account).unwrap();
        assert!(!world.write(&policy(1)), "nothing to do");
        world.write(&policy(2));
        assert_eq!(fs::read(world.path(ACCOUNT)).unwrap(), account);
    }

    /// As a container has it mounted.
    #[test]
    fn a_page_is_changed_in_the_file_that_is_there() {
        let world = World::new();
        world.write(&policy(1));
        let [page, account] = [POLICY, ACCOUNT].map(|name| File::open(world.path(name)).unwrap());
        assert!(world.write(&policy(2)));
        assert!(world.write(&policy(3)));
        let mut bytes = vec![0; SIZE];
        std::os::unix::fs::FileExt::read_exact_at(&page, &mut bytes, 0).unwrap();
        assert_eq!(Policy::decode(&bytes), Ok((3, policy(3))));
        fs::write(world.path(ACCOUNT), "").unwrap();
        assert!(world.write(&policy(3)), "one that its processes cut short");
        assert_eq!(account.metadata().unwrap().len(), account::SIZE as u64);
        fs::write(world.path(POLICY), "").unwrap();
        assert!(world.write(&policy(3)));
        assert_eq!(page.metadata().unwrap().len(), SIZE as u64);
    }

    #[test]
    fn what_the_agent_has_decided_stays() {
        let world = World::new();
        let native = |limit| Policy { flags: Flags::STRICT.with(Flags::NATIVE_MEMORY), ..policy(limit) };
        world.write(&native(1));
        assert!(!world.write(&policy(1)));
        assert!(world.write(&policy(2)));
        assert_eq!(world.read().1, native(2));
    }

    #[test]
    fn names_from_outside_lead_nowhere() {
        let world = World::new();
        for name in ["", ".", "..", ".x", "a/b", "../x", &"x".repeat(65)] {
            assert!(world.shares.write(&claim(), &name.into(), &policy(1)).is_err(), "{name:?}");
            assert!(world.shares.write(&name.into(), &"s".into(), &policy(1)).is_err(), "{name:?}");
            world.shares.remove(&name.into()).unwrap();
        }
        assert!(!world.dir.path().join("run").exists());
    }

    #[test]
    fn the_hook_tells_of_containers() {
        let world = World::new();
        world.write(&policy(1));
        let told = |name: &str, text: &str| fs::write(world.path(CGROUPS).join(name), text).unwrap();
        told("c2", "0::/b\n");
        told("c1", "0::/a\n");
        told(".part", "0::/");
        let expected =
            [("c1", "0::/a\n"), ("c2", "0::/b\n")].map(|(id, text)| (id.to_owned(), text.to_owned()));
        assert_eq!(world.shares.cgroups(&claim(), &"s".into()), expected);
        assert!(world.shares.cgroups(&claim(), &"other".into()).is_empty());
    }

    #[test]
    fn a_mount_in_any_process_is_seen() {
        let dir = tempfile::tempdir().unwrap();
        let mounts = "63 43 0:25 /divvy/shares/c/s/policy /run/divvy/c/s/policy ro - tmpfs tmpfs rw\n";
        for (pid, text) in [("17", "1 0 0:1 / / rw - ext4 /dev/sda /shares/d/\n"), ("18", mounts)] {
            fs::create_dir(dir.path().join(pid)).unwrap();
            fs::write(dir.path().join(pid).join("mountinfo"), text).unwrap();
        }
        assert!(is_mounted(dir.path(), &claim()));
        assert!(!is_mounted(dir.path(), &"d".into()));
    }
}
