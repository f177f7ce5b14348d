//! The pages of the shares that this container holds: found, judged, mapped.
//!
//! They lie under one fixed path, as `<claim UID>/<share ID>/{policy,account}`, each file mounted by itself. A policy is
//! believed only where root owns the file, the file itself is a mount and the mount is read-only: what an image brings
//! or a program writes there is none of these at once. (A volume of the pod can be; admission refuses those, and the
//! node looks at the container's mounts.) A container that has policies and none that can be believed holds nothing:
//! its allocations are refused. One without any is not a share, and every call is the driver's.
//!
//! An account is looked for when something is charged: many a program only asks how large its GPU is, which the policy
//! says.

use crate::sys::{self, File, From};
use divvy_interposer_core::{AccountPage, Found, Policy, PolicyPage};

const ROOT: &[u8] = b"/run/divvy\0";
/// Beside the claims: this library. No claim's UID is a word.
const LIBRARY: &[u8] = b"lib\0";
/// A claim's or a share's name on a policy, with a zero byte.
const NAMED: usize = 65;
/// What a file takes at most; both pages are far below.
const LARGEST: usize = 1 << 20;
/// `nobody`: how an owner is shown that the process's user namespace does not have.
const OVERFLOW: u32 = 65534;

/// Calls `visit` with all policies that are there, in no order.
#[cold]
pub(crate) fn each(mut visit: impl FnMut(Found)) {
    let Some(root) = sys::open_directory(From::Root, ROOT) else { return };
    each_name(&root, |claim| {
        if claim == LIBRARY {
            return;
        }
        let Some(claim) = sys::open_directory(From::Directory(&root), claim) else { return };
        each_name(&claim, |share| {
            if let Some(policy) = policy(&claim, share) {
                visit(believed(&policy).map_or(Found::Refused, Found::Policy));
            }
        });
    });
}

/// The policy in the directory of a share. One call opens what lies in it, in place of one more and another that closes it:
/// they are a good part of a start.
#[inline(always)]
fn policy(claim: &File, share: &[u8]) -> Option<File> {
    const POLICY: &[u8; 8] = b"/policy\0";
    let mut path = [0; NAMED + POLICY.len()];
    let end = share.len().saturating_sub(1);
    path.get_mut(..end)?.copy_from_slice(share.get(..end)?);
    path.get_mut(end..end + POLICY.len())?.copy_from_slice(POLICY);
    sys::open_within(claim, &path).or_else(|| {
        let share = sys::open_directory(From::Directory(claim), share)?;
        sys::open_to_read(From::Directory(&share), b"policy\0")
    })
}

#[cold]
fn believed(policy: &File) -> Option<&'static PolicyPage> {
    let facts = policy.facts().filter(|facts| {
        facts.regular
            && facts.mounted
            && root_owns(facts.owner)
            && facts.bytes <= LARGEST
            && policy.is_read_only()
    })?;
    // SAFETY: the mapping has the length of its file and is never taken away.
    unsafe { PolicyPage::at(policy.map(facts.bytes, false)?, facts.bytes) }
}

/// The account of the share with that policy, which lies under the names that the policy says.
#[cold]
pub(crate) fn account(policy: &Policy) -> Option<&'static AccountPage> {
    let mut at = sys::open_directory(From::Root, ROOT)?;
    for text in [policy.claim, policy.share] {
        let mut name = [0; NAMED];
        name[..NAMED - 1].copy_from_slice(text.bytes());
        at = sys::open_directory(From::Directory(&at), &name)?;
    }
    let account = sys::open_to_write(From::Directory(&at), b"account\0")?;
    let facts = account.facts().filter(|facts| facts.regular && facts.mounted && facts.bytes <= LARGEST)?;
    // SAFETY: the mapping has the length of its file and is never taken away. (Who can shorten the file is the tenant,
    // and it is the tenant's processes that then end.)
    unsafe { AccountPage::at(account.map(facts.bytes, true)?, facts.bytes).ok() }
}

/// In a pod with a user namespace of its own the node's root is nobody.
fn root_owns(owner: u32) -> bool {
    owner == 0 || (owner == OVERFLOW && !has_every_user())
}

/// Whether the process's user namespace maps every user to itself: `0 0 4294967295`.
fn has_every_user() -> bool {
    let mut line = [0; 128];
    let read = sys::open_to_read(From::Root, b"/proc/self/uid_map\0").map_or(0, |file| file.read(&mut line));
    let mut numbers = line[..read].split(|byte| byte.is_ascii_whitespace()).filter(|word| !word.is_empty());
    numbers.next() == Some(b"0") && numbers.next() == Some(b"0") && numbers.next() == Some(b"4294967295")
}

/// Calls `visit` with each name in a directory but `.` and `..`, with its zero byte.
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
