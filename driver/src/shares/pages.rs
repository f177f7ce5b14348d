//! The pages of shares on the host. The policy page has the limits of a share, the account page has
//! its usage, written by its processes.
//!
//! Each (claim, shareID) has one pair of pages and names one device. The pages are in memory: a reboot
//! removes them together with the processes, and they are written again from the records. Processes
//! outlive the daemon, and a container would not see a replaced file. So an existing account file is
//! kept, and a policy is changed in place (see [`divvy_pages::policy`]).

use crate::containers::registered;
use crate::paths::HostPaths;
use divvy_api::text::is_file_name;
use divvy_api::{ClaimUid, ShareId};
use divvy_pages::policy::{PolicyError, SIZE};
use divvy_pages::{Flags, Memory, Policy, PolicyPage, account};
use rustix::fs::OFlags;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::thread::futex;
use std::fs::{DirBuilder, File, Permissions};
use std::io::Read;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::{fs, io, ptr};

/// Maximum length of a claim UID or share ID on the policy page, in bytes.
const MAX_NAME_BYTES: usize = 64;

/// Directory in containers with the pages of their shares.
pub const IN_CONTAINER: &str = "/run/divvy";
/// Below the run directory: one directory for each claim, named by its UID.
pub(crate) const DIRECTORY: &str = "shares";
pub const POLICY: &str = "policy";
pub const ACCOUNT: &str = "account";
pub const CGROUPS: &str = "cgroups";
pub const PRELOAD: &str = "preload";
const VIOLATION_MARKER: &str = "told";

/// Why pages could not be written or removed.
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
///
/// ```text
/// <run dir>/shares/<claim UID>/<shareID>/
///     policy     limits; written by root, mode 0444
///     account    usage; written by the share's processes, mode 0666
///     cgroups/   cgroups of the containers, by container id (from the hook)
///     preload/   preload lists, by container id (from the hook)
///     told       exists while the claim's status reports a violation
/// ```
///
/// Containers mount the two files individually, so that processes that write an account reach no
/// directory of the host. Only root can access the directories.
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

    /// All shares that have a directory.
    pub fn all(&self) -> Vec<(ClaimUid, ShareId)> {
        let of_claim = |claim: ClaimUid| {
            let entries = fs::read_dir(self.dir.join(claim.as_str())).into_iter().flatten().flatten();
            let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
            names.map(|name| (claim.clone(), ShareId::from(name))).collect::<Vec<_>>()
        };
        self.claims().into_iter().flat_map(of_claim).collect()
    }

    /// Writes the pages of a share where they are missing or differ; returns whether it wrote. The
    /// GPU's lock makes this process the only writer of the policy.
    pub fn write(&self, claim: &ClaimUid, share: &ShareId, policy: &Policy) -> Result<bool, PagesError> {
        if [claim.as_str(), share.as_str()].into_iter().any(|name| !is_file_name(name, MAX_NAME_BYTES)) {
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
            // A truncated account may be mounted, so it is extended in place.
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
            && read(&dir.join(POLICY)).is_ok_and(|page| has_policy(&page, policy) == Ok(true))
    }

    /// Asks the processes of a share to release unused memory of their pools.
    pub fn trim(&self, claim: &ClaimUid, share: &ShareId) -> io::Result<()> {
        let mapped = MappedPolicy::open(&self.of(claim, share).join(POLICY))?;
        let word = mapped.page().ok_or(io::ErrorKind::InvalidData)?.trim();
        word.fetch_add(1, Ordering::SeqCst);
        futex::wake(word, futex::Flags::empty(), i32::MAX as u32)?;
        Ok(())
    }

    /// Removes the pages of a claim; succeeds if there are none.
    pub fn remove(&self, claim: &ClaimUid) -> Result<(), PagesError> {
        if !is_file_name(claim.as_str(), MAX_NAME_BYTES) {
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

    /// The shares whose violation is reported in the status of their claim.
    pub fn reported_violations(&self) -> Vec<(ClaimUid, ShareId)> {
        let is_reported =
            |(claim, share): &(ClaimUid, ShareId)| self.of(claim, share).join(VIOLATION_MARKER).exists();
        self.all().into_iter().filter(is_reported).collect()
    }

    /// Stores whether a violation of the share is reported.
    pub fn set_violation_reported(&self, claim: &ClaimUid, share: &ShareId, wrong: bool) -> io::Result<()> {
        let path = self.of(claim, share).join(VIOLATION_MARKER);
        match wrong {
            true => fs::write(path, ""),
            false => fs::remove_file(path),
        }
    }

    /// Memory in use by a share, in bytes, according to its account page, which its processes write.
    /// `None` if there is no readable account.
    pub fn used(&self, claim: &ClaimUid, share: &ShareId) -> Option<u64> {
        let mut header = [0; account::HEADER];
        let file = open(&self.of(claim, share).join(ACCOUNT), false).ok()?;
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut header, 0).ok()?;
        account::Snapshot::new(&header).ok().map(|page| page.used())
    }

    /// The containers of a share that the hook registered: id, and the contents of
    /// `/proc/<pid>/cgroup` of the first process.
    pub fn cgroups(&self, claim: &ClaimUid, share: &ShareId) -> Vec<(String, String)> {
        registered(&self.of(claim, share).join(CGROUPS))
    }
}

/// Resets an account in the existing file. If a container holds a lease on it, the agent does it later.
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

/// Whether a page has that policy, apart from fields that the agent sets.
fn has_policy(page: &[u8], wanted: &Policy) -> Result<bool, PolicyError> {
    let (_, have) = Policy::decode(page)?;
    Ok(have == with_agent_fields(wanted, &have))
}

/// The policy with the agent's fields as they are on the page.
fn with_agent_fields(wanted: &Policy, have: &Policy) -> Policy {
    let native = Flags(have.flags.0 & Flags::NATIVE_MEMORY.0);
    // The charge for contexts stays, since existing contexts were charged with it.
    let memory = Memory { context: have.memory.context, ..wanted.memory };
    Policy { flags: wanted.flags.with(native), memory, ..*wanted }
}

/// Changes a page that may be mounted; returns whether it differed.
fn change(path: &Path, page: &[u8], wanted: &Policy) -> Result<bool, PagesError> {
    let failed = |cause| PagesError::Change { path: path.to_owned(), cause };
    let have = match Policy::decode(page) {
        Ok((_, have)) => have,
        // Only root can write the page, so it was never valid and no process uses it.
        Err(_) => {
            let written = fs::write(path, wanted.encode());
            return written
                .map(|()| true)
                .map_err(|cause| PagesError::Write { path: path.to_owned(), cause });
        }
    };
    let wanted = with_agent_fields(wanted, &have);
    if have == wanted {
        return Ok(false);
    }
    let replaced =
        MappedPolicy::open(path).map_err(|cause| PagesError::Write { path: path.to_owned(), cause })?;
    replaced.page().map_or(Err(PolicyError::Foreign), |page| page.replace(&wanted)).map_err(failed)?;
    tracing::info!(path = %path.display(), "policy of a share updated in place");
    Ok(true)
}

/// Opens a page without waiting. Fails with `WouldBlock` if root in a container holds a lease on it
/// (`F_SETLEASE`): the daemon must not wait for a tenant.
pub(crate) fn open(path: &Path, write: bool) -> io::Result<File> {
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    File::options().read(true).write(write).custom_flags(flags).open(path)
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut page = Vec::with_capacity(SIZE);
    open(path, false)?.read_to_end(&mut page)?;
    Ok(page)
}

/// Creates a file at `path` atomically.
pub(super) fn create(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let part = path.with_extension("part");
    fs::write(&part, bytes)
        // Set separately, because the umask applies to the mode at creation.
        .and_then(|()| fs::set_permissions(&part, Permissions::from_mode(mode)))
        .and_then(|()| fs::rename(&part, path))
        // A left-over file would only take space; the first error is the one to report.
        .inspect_err(|_| drop(fs::remove_file(&part)))
}

/// A policy page mapped into this process, to change it in place.
#[derive(Debug)]
pub(crate) struct MappedPolicy {
    address: ptr::NonNull<u8>,
}

// SAFETY: the mapping belongs to no thread, and all fields of the page are atomics.
#[allow(unsafe_code)]
unsafe impl Send for MappedPolicy {}

#[allow(unsafe_code)]
impl MappedPolicy {
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let file = open(path, true)?;
        if file.metadata()?.len() != SIZE as u64 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses the address of the new mapping, so no other memory is
        // affected. Only root can write the file, so it is not truncated while it is mapped.
        let address = unsafe { mmap(ptr::null_mut(), SIZE, access, MapFlags::SHARED, &file, 0)? };
        ptr::NonNull::new(address.cast())
            .map(|address| Self { address })
            .ok_or_else(|| io::ErrorKind::Other.into())
    }

    pub(crate) fn page(&self) -> Option<&PolicyPage> {
        // SAFETY: `SIZE` bytes are mapped readable and writable until `self` is dropped, and the
        // result borrows `self`.
        unsafe { PolicyPage::at(self.address.as_ptr(), SIZE) }
    }
}

#[allow(unsafe_code)]
impl Drop for MappedPolicy {
    fn drop(&mut self) {
        // SAFETY: `open` mapped this range, it is unmapped once, and nothing borrows it any more.
        // Unmapping an existing mapping does not fail.
        let _ = unsafe { munmap(self.address.as_ptr().cast(), SIZE) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use divvy_pages::{Compute, Text};

    struct SharesFixture {
        dir: tempfile::TempDir,
        shares: Shares,
    }

    impl SharesFixture {
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
    fn pages_are_created_for_containers_and_directories_are_private() {
        let fixture = SharesFixture::new();
        assert!(!fixture.shares.is_written(&claim(), &"s".into(), &policy(1)));
        assert!(fixture.write(&policy(1)));
        assert_eq!(fixture.read(), (1, policy(1)));
        assert_eq!((mode(&fixture.path(POLICY)), mode(&fixture.path(ACCOUNT))), (0o444, 0o666));
        for dir in ["run/shares", "run/shares/c", "run/shares/c/s", "run/shares/c/s/cgroups"] {
            assert_eq!(mode(&fixture.dir.path().join(dir)), 0o700, "{dir}");
        }
        let account = fs::read(fixture.path(ACCOUNT)).unwrap();
        assert_eq!(account.len(), account::SIZE);
        assert_eq!(account::Snapshot::new(&account).unwrap().used(), 0);
        assert_eq!(fixture.shares.claims(), [claim()]);
        fixture.shares.remove(&claim()).unwrap();
        fixture.shares.remove(&claim()).unwrap();
        assert!(fixture.shares.claims().is_empty());
    }

    #[test]
    fn account_in_use_is_never_changed() {
        let fixture = SharesFixture::new();
        fixture.write(&policy(1));
        let mut account = fs::read(fixture.path(ACCOUNT)).unwrap();
        account[5000] = 7;
        fs::write(fixture.path(ACCOUNT), &account).unwrap();
        assert!(!fixture.write(&policy(1)), "nothing to do");
        fixture.write(&policy(2));
        assert_eq!(fs::read(fixture.path(ACCOUNT)).unwrap(), account);
    }

    /// Open files stand for the mounts of a container.
    #[test]
    fn pages_are_changed_in_the_existing_files() {
        let fixture = SharesFixture::new();
        fixture.write(&policy(1));
        let [page, account] = [POLICY, ACCOUNT].map(|name| File::open(fixture.path(name)).unwrap());
        assert!(fixture.write(&policy(2)));
        assert!(fixture.write(&policy(3)));
        let mut bytes = vec![0; SIZE];
        std::os::unix::fs::FileExt::read_exact_at(&page, &mut bytes, 0).unwrap();
        assert_eq!(Policy::decode(&bytes), Ok((3, policy(3))));
        fs::write(fixture.path(ACCOUNT), "").unwrap();
        assert!(fixture.write(&policy(3)), "account truncated by its processes");
        assert_eq!(account.metadata().unwrap().len(), account::SIZE as u64);
        fs::write(fixture.path(POLICY), "").unwrap();
        assert!(fixture.write(&policy(3)));
        assert_eq!(page.metadata().unwrap().len(), SIZE as u64);
    }

    #[test]
    fn fields_set_by_the_agent_are_kept() {
        let fixture = SharesFixture::new();
        let native = |limit| Policy { flags: Flags::STRICT.with(Flags::NATIVE_MEMORY), ..policy(limit) };
        fixture.write(&native(1));
        assert!(!fixture.write(&policy(1)));
        assert!(fixture.write(&policy(2)));
        assert_eq!(fixture.read().1, native(2));
    }

    #[test]
    fn names_with_path_separators_are_refused() {
        let fixture = SharesFixture::new();
        for name in ["", ".", "..", ".x", "a/b", "../x", &"x".repeat(65)] {
            assert!(fixture.shares.write(&claim(), &name.into(), &policy(1)).is_err(), "{name:?}");
            assert!(fixture.shares.write(&name.into(), &"s".into(), &policy(1)).is_err(), "{name:?}");
            fixture.shares.remove(&name.into()).unwrap();
        }
        assert!(!fixture.dir.path().join("run").exists());
    }

    #[test]
    fn containers_registered_by_the_hook_are_listed() {
        let fixture = SharesFixture::new();
        fixture.write(&policy(1));
        let registered = |name: &str, text: &str| fs::write(fixture.path(CGROUPS).join(name), text).unwrap();
        registered("c2", "0::/b\n");
        registered("c1", "0::/a\n");
        registered(".part", "0::/");
        let expected =
            [("c1", "0::/a\n"), ("c2", "0::/b\n")].map(|(id, text)| (id.to_owned(), text.to_owned()));
        assert_eq!(fixture.shares.cgroups(&claim(), &"s".into()), expected);
        assert!(fixture.shares.cgroups(&claim(), &"other".into()).is_empty());
    }
}
