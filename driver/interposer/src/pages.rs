//! Finds, validates and maps the pages of the container's shares.
//!
//! Pages are at `/run/divvy/<claim UID>/<share ID>/{policy,account}`, each file mounted separately.
//! A policy is trusted only if root owns the file, the file itself is a mount point, and the mount
//! is read-only. Files from an image or written by a program never meet all three; pod volumes
//! could, so admission refuses those, and the node checks the container's mounts. If a container
//! has only untrusted policies, its allocations are refused. Without policies, every call goes to
//! the driver.

use crate::sys::{self, File, From};
use divvy_interposer_core::{AccountPage, MountedPolicy, Policy, PolicyPage};

const ROOT: &[u8] = b"/run/divvy\0";
/// The directory of this library, beside the claims. It cannot be a claim UID.
const LIBRARY_DIR: &[u8] = b"lib\0";
/// Length of a claim or share name on a policy, including a zero byte.
const NAME_SIZE: usize = 65;
/// Maximum size of a file; both pages are much smaller.
const FILE_SIZE_MAX: usize = 1 << 20;
/// `nobody`: shown for owners that the process's user namespace does not map.
const OVERFLOW_UID: u32 = 65534;

/// Calls `visit` with all policies, in any order.
#[cold]
pub(crate) fn for_each_policy(mut visit: impl FnMut(MountedPolicy)) {
    let Some(root) = sys::open_directory(From::Root, ROOT) else { return };
    each_name(&root, |claim| {
        if claim == LIBRARY_DIR {
            return;
        }
        let Some(claim) = sys::open_directory(From::Directory(&root), claim) else { return };
        each_name(&claim, |share| {
            if let Some(policy) = policy(&claim, share) {
                visit(trusted_page(&policy).map_or(MountedPolicy::Untrusted, MountedPolicy::Trusted));
            }
        });
    });
}

/// Opens the policy in a share's directory. One call opens the whole path, because system calls are
/// a large part of a start.
#[inline(always)]
fn policy(claim: &File, share: &[u8]) -> Option<File> {
    const POLICY: &[u8; 8] = b"/policy\0";
    let mut path = [0; NAME_SIZE + POLICY.len()];
    let end = share.len().saturating_sub(1);
    path.get_mut(..end)?.copy_from_slice(share.get(..end)?);
    path.get_mut(end..end + POLICY.len())?.copy_from_slice(POLICY);
    sys::open_within(claim, &path).or_else(|| {
        let share = sys::open_directory(From::Directory(claim), share)?;
        sys::open_to_read(From::Directory(&share), b"policy\0")
    })
}

#[cold]
fn trusted_page(policy: &File) -> Option<&'static PolicyPage> {
    let facts = policy.facts().filter(|facts| {
        facts.regular
            && facts.mounted
            && root_owns(facts.owner)
            && facts.bytes <= FILE_SIZE_MAX
            && policy.is_read_only()
    })?;
    // SAFETY: the mapping has the length of its file and is never unmapped.
    unsafe { PolicyPage::at(policy.map(facts.bytes, false)?, facts.bytes) }
}

/// The account page of the share with this policy, found by the names in the policy.
#[cold]
pub(crate) fn account(policy: &Policy) -> Option<&'static AccountPage> {
    let mut at = sys::open_directory(From::Root, ROOT)?;
    for text in [policy.claim, policy.share] {
        let mut name = [0; NAME_SIZE];
        name[..NAME_SIZE - 1].copy_from_slice(text.bytes());
        at = sys::open_directory(From::Directory(&at), &name)?;
    }
    let account = sys::open_to_write(From::Directory(&at), b"account\0")?;
    let facts =
        account.facts().filter(|facts| facts.regular && facts.mounted && facts.bytes <= FILE_SIZE_MAX)?;
    // SAFETY: the mapping has the length of its file and is never unmapped. (Only the tenant can
    // truncate the file, which kills only the tenant's own processes.)
    unsafe { AccountPage::at(account.map(facts.bytes, true)?, facts.bytes).ok() }
}

/// In a pod with its own user namespace, the node's root is shown as `nobody`.
fn root_owns(owner: u32) -> bool {
    owner == 0 || (owner == OVERFLOW_UID && !has_every_user())
}

/// Returns true if the process's user namespace maps every user to itself: `0 0 4294967295`.
fn has_every_user() -> bool {
    let mut line = [0; 128];
    let read = sys::open_to_read(From::Root, b"/proc/self/uid_map\0").map_or(0, |file| file.read(&mut line));
    let mut numbers = line[..read].split(|byte| byte.is_ascii_whitespace()).filter(|word| !word.is_empty());
    numbers.next() == Some(b"0") && numbers.next() == Some(b"0") && numbers.next() == Some(b"4294967295")
}

/// Calls `visit` with each name in a directory except `.` and `..`, including its zero byte.
#[cold]
fn each_name(directory: &File, mut visit: impl FnMut(&[u8])) {
    // struct linux_dirent64: inode, offset, length of the entry, type, name.
    const LENGTH: usize = 16;
    const NAME: usize = 19;
    let mut entries = [0; 1024];
    loop {
        let filled = directory.entries(&mut entries);
        let mut rest = entries.get(..filled).unwrap_or_default();
        if rest.is_empty() {
            return;
        }
        while let Some(length) = rest.get(LENGTH..LENGTH + 2) {
            let length = usize::from(u16::from_ne_bytes([length[0], length[1]]));
            let Some((entry, after)) = rest.split_at_checked(length) else { return };
            rest = after;
            let name = entry.get(NAME..).unwrap_or_default();
            let end = name.iter().position(|byte| *byte == 0).unwrap_or(0);
            if !matches!(&name[..end], b"" | b"." | b"..") {
                visit(&name[..=end]);
            }
            if length == 0 {
                return;
            }
        }
    }
}
