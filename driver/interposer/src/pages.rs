//! The pages of the shares that this container holds: found, judged, mapped.
//!
//! They lie under one fixed path, as `<claim UID>/<share ID>/{policy,account}`, each file mounted by itself. A policy is
//! believed only where root owns the file, the file itself is a mount and the mount is read-only: what an image brings
//! or a program writes there is none of these at once. (A volume of the pod can be; admission refuses those, and the
//! node looks at the container's mounts.) A container that has policies and none that can be believed holds nothing:
//! its allocations are refused. One without any is not a share, and every call is the driver's.

use crate::sys::{self, File, From};
use divvy_interposer_core::{AccountPage, Found, PolicyPage};

const ROOT: &[u8] = b"/run/divvy\0";
/// Beside the claims: this library. No claim's UID is a word.
const LIBRARY: &[u8] = b"lib\0";
/// What a file takes at most; both pages are far below.
const LARGEST: usize = 1 << 20;
/// `nobody`: how an owner is shown that the process's user namespace does not have.
const OVERFLOW: u32 = 65534;

/// Calls `visit` with all that is there, in no order.
pub(crate) fn each(visit: &mut dyn FnMut(Found)) {
    let Some(root) = sys::open_directory(From::Root, ROOT) else { return };
    each_name(&root, &mut |claim| {
        if claim == LIBRARY {
            return;
        }
        let Some(claim) = sys::open_directory(From::Directory(&root), claim) else { return };
        each_name(&claim, &mut |share| {
            let Some(share) = sys::open_directory(From::Directory(&claim), share) else { return };
            if let Some(policy) = sys::open_to_read(From::Directory(&share), b"policy\0") {
                visit(pair(&share, &policy).unwrap_or(Found::Refused));
            }
        });
    });
}

fn pair(share: &File, policy: &File) -> Option<Found> {
    let account = sys::open_to_write(From::Directory(share), b"account\0")?;
    let said = policy.facts().filter(|facts| {
        facts.regular
            && facts.mounted
            && root_owns(facts.owner)
            && facts.bytes <= LARGEST
            && policy.is_read_only()
    })?;
    let counted = account.facts().filter(|facts| facts.regular && facts.mounted && facts.bytes <= LARGEST)?;
    let mut head = [0; 64];
    account.read(&mut head);
    // SAFETY: both mappings have the lengths of their files and are never taken away. (Who can shorten the account
    // page's file is the tenant, and it is the tenant's processes that then end.)
    unsafe {
        let policy = PolicyPage::at(policy.map(said.bytes, false)?, said.bytes)?;
        let account = AccountPage::untouched(&head, account.map(counted.bytes, true)?, counted.bytes).ok()?;
        Some(Found::Pair(policy, account))
    }
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
fn each_name(directory: &File, visit: &mut dyn FnMut(&[u8])) {
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
