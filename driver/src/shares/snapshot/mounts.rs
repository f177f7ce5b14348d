//! Checks the mounts at the places where a process looks for the pages of its shares.
//!
//! Mounts form a tree. A path is resolved as the kernel does it: from the root, name by name, into
//! the last mount on each. This detects a mount over the page, over a directory above it, or in its
//! place, and ignores a mount that another one hides. Source: `Documentation/filesystems/proc.rst`,
//! section 3.5.

use crate::shares::{ACCOUNT, IN_CONTAINER, POLICY};
use std::borrow::Cow;
use std::collections::BTreeSet;

/// On the host, every page is below a directory of this name.
const SHARES_DIR: &str = "/shares/";

/// A line of `/proc/<pid>/mountinfo`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mount {
    id: u32,
    parent: u32,
    /// Major and minor number of the file system.
    pub(crate) device: (u32, u32),
    /// The mounted path within its file system.
    pub(crate) root: String,
    /// The mount point, as the process sees it.
    pub(crate) point: String,
    pub(crate) read_only: bool,
}

/// The mounts of a process that matter to its pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mounts {
    list: Vec<Mount>,
    /// The list was not cut short by a limit.
    is_complete: bool,
}

/// The location of a page on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Page {
    /// Major and minor number of the file system.
    pub(crate) device: (u32, u32),
    /// `<claim UID>/<shareID>`.
    pub(crate) share: String,
}

/// A fault in what a process sees of a share.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fault {
    /// Nothing is mounted at that path.
    Missing(String),
    /// Something else is mounted at that path or above it.
    Masked(String),
    /// The policy page is writable there.
    Writable(String),
    /// A page that is not one of the host's.
    Forged(String),
    /// There are more mounts than the agent reads.
    TooManyMounts,
}

/// At most this much of the file is read. Honest containers have a hundredth of it, but a container
/// may make a hundred thousand mounts (`/proc/sys/fs/mount-max`).
pub(crate) const MOUNTINFO_MAX_BYTES: usize = 1 << 20;
/// More mounts of pages than any honest container has.
const MOUNTS_MAX: usize = 256;
/// Bytes of paths that are kept per process. Honest processes have 500 for each share. A container
/// may have a thousand processes and paths of 4 KiB, and the agent keeps the mounts of all of them.
const MOUNT_PATHS_MAX_BYTES: usize = 16 << 10;

/// Parses the mounts that can affect paths below [`IN_CONTAINER`], and all mounts of pages. Pages
/// are kept wherever they are, because the root of the container may rename a directory above them.
pub(crate) fn parse(mountinfo: &str) -> Mounts {
    let (mut list, mut path_bytes) = (Vec::new(), 0);
    let mut is_complete = mountinfo.len() < MOUNTINFO_MAX_BYTES;
    for mount in mountinfo.lines().filter_map(Mount::parse) {
        path_bytes += mount.root.len() + mount.point.len();
        if list.len() == MOUNTS_MAX || path_bytes > MOUNT_PATHS_MAX_BYTES {
            is_complete = false;
            break;
        }
        list.push(mount);
    }
    Mounts { list, is_complete }
}

/// Whether a mount point is above, at or below the directory of pages.
fn affects_pages(point: &str) -> bool {
    is_below(IN_CONTAINER, point) || is_below(point, IN_CONTAINER)
}

/// Whether a path is equal to another or below it.
fn is_below(path: &str, above: &str) -> bool {
    let above = above.trim_end_matches('/');
    path.strip_prefix(above).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

impl Mount {
    /// Parses a line; `None` if it is malformed or, like most lines, irrelevant.
    fn parse(line: &str) -> Option<Self> {
        let mut fields = line.split(' ');
        let (id, parent, device) = (fields.next()?, fields.next()?, fields.next()?);
        let (root, point) = (unescape(fields.next()?), unescape(fields.next()?));
        if !affects_pages(&point) && !root.contains(SHARES_DIR) {
            return None;
        }
        let (id, parent) = (id.parse().ok()?, parent.parse().ok()?);
        let (major, minor) = device.split_once(':')?;
        let device = (major.parse().ok()?, minor.parse().ok()?);
        let (root, point) = (root.into_owned(), point.into_owned());
        let read_only = fields.next()?.split(',').any(|option| option == "ro");
        Some(Self { id, parent, device, root, point, read_only })
    }

    /// Whether it is this file of this page.
    fn is(&self, page: &Page, file: &str) -> bool {
        let root = self.root.strip_suffix(file).and_then(|root| root.strip_suffix('/'));
        let share = root.and_then(|root| root.strip_suffix(page.share.as_str()));
        self.device == page.device && share.is_some_and(|dir| dir.ends_with(SHARES_DIR))
    }
}

/// Decodes a path, in which space, tab, newline and backslash are written in octal.
fn unescape(field: &str) -> Cow<'_, str> {
    if !field.contains('\\') {
        return Cow::Borrowed(field);
    }
    let mut text = String::with_capacity(field.len());
    let mut rest = field;
    while let Some((plain, escaped)) = rest.split_once('\\') {
        text.push_str(plain);
        match escaped.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                text.push(char::from(byte));
                rest = escaped.get(3..).unwrap_or_default();
            }
            None => {
                text.push('\\');
                rest = escaped;
            }
        }
    }
    Cow::Owned(text + rest)
}

/// The mount that a path resolves to. `None` if the mounts form a cycle. The kernel has no cycles,
/// but the file is read in pieces, and a mount id is reused as soon as its mount is gone.
fn resolve<'a>(mounts: &'a [Mount], path: &str) -> Option<&'a Mount> {
    let known: BTreeSet<u32> =
        mounts.iter().filter(|mount| mount.parent != mount.id).map(|mount| mount.id).collect();
    let (mut here, mut steps): (Option<&Mount>, usize) = (None, 0);
    let ends = path.match_indices('/').map(|(at, _)| at.max(1)).skip(1).chain([path.len()]);
    for name in std::iter::once("/").chain(ends.filter_map(|end| path.get(..end))) {
        // Repeat, because a mount can be covered by another mount at the same point.
        while let Some(next) = mounts.iter().find(|mount| {
            let is_child = match here {
                // The file lists neither the parent of the root nor mounts outside of a chroot.
                None => !known.contains(&mount.parent) || mount.parent == mount.id,
                Some(here) => mount.parent == here.id && mount.id != here.id,
            };
            is_child && mount.point == name
        }) {
            here = Some(next);
            steps += 1;
            if steps > mounts.len() {
                return None;
            }
        }
    }
    here
}

/// The faults in the pages of a share as a process with these mounts sees them.
pub(crate) fn check(mounts: &Mounts, page: &Page) -> Vec<Fault> {
    if !mounts.is_complete {
        return vec![Fault::TooManyMounts];
    }
    let mounts = mounts.list.as_slice();
    let check_file = |file: &str| {
        let path = format!("{IN_CONTAINER}/{}/{file}", page.share);
        match resolve(mounts, &path) {
            Some(mount) if mount.is(page, file) && mount.point == path => {
                (file == POLICY && !mount.read_only).then_some(Fault::Writable(path))
            }
            // Something else is mounted on the way to the page.
            Some(mount) if is_below(&mount.point, IN_CONTAINER) => Some(Fault::Masked(path)),
            _ => match mounts.iter().any(|mount| mount.is(page, file)) {
                true => Some(Fault::Masked(path)),
                false => Some(Fault::Missing(path)),
            },
        }
    };
    [POLICY, ACCOUNT].into_iter().filter_map(check_file).collect()
}

/// Pages that a process sees and that are none of these. An incomplete list of mounts is not searched.
pub(crate) fn forged(mounts: &Mounts, pages: &[&Page]) -> Vec<Fault> {
    if !mounts.is_complete {
        return Vec::new();
    }
    let mounts = mounts.list.as_slice();
    let is_forged = |mount: &&Mount| {
        let Some(rest) = mount.point.strip_prefix(IN_CONTAINER) else { return false };
        let parts: Vec<&str> = rest.split('/').skip(1).collect();
        // Mounts above all pages and those of the library are not pages.
        let [claim, ..] = parts[..] else { return false };
        if claim == "lib" {
            return false;
        }
        let is_known = pages.iter().any(|page| [POLICY, ACCOUNT].iter().any(|file| mount.is(page, file)));
        !is_known && resolve(mounts, &mount.point).is_some_and(|top| top.id == mount.id)
    };
    mounts.iter().filter(is_forged).map(|mount| Fault::Forged(mount.point.clone())).collect()
}

/// Whether the policy page of a share is among the mounts, hidden or not.
pub(crate) fn has(mounts: &Mounts, page: &Page) -> bool {
    mounts.list.iter().any(|mount| mount.is(page, POLICY))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ROOT: &str = "100 90 0:50 / / rw,relatime - overlay overlay rw";
    const PROC: &str = "101 100 0:51 / /proc rw - proc proc rw";
    const PAGE: &str = "/run/divvy/c-1/s-1/policy";

    fn page() -> Page {
        Page { device: (0, 25), share: "c-1/s-1".to_owned() }
    }

    fn policy(id: u32, parent: u32, options: &str) -> String {
        format!("{id} {parent} 0:25 /divvy/shares/c-1/s-1/policy {PAGE} {options} - tmpfs tmpfs rw")
    }

    fn account(id: u32, parent: u32) -> String {
        format!(
            "{id} {parent} 0:25 /divvy/shares/c-1/s-1/account /run/divvy/c-1/s-1/account rw,nosuid \
             - tmpfs tmpfs rw"
        )
    }

    fn masked() -> Fault {
        Fault::Masked(PAGE.to_owned())
    }

    fn missing() -> Fault {
        Fault::Missing(PAGE.to_owned())
    }

    fn lines(more: &[String]) -> String {
        let head = [ROOT.to_owned(), PROC.to_owned(), account(102, 100)];
        head.iter().chain(more).map(|line| format!("{line}\n")).collect()
    }

    fn faults(more: &[String]) -> Vec<Fault> {
        check(&parse(&lines(more)), &page())
    }

    #[test]
    fn host_page_must_be_mounted_read_only() {
        assert_eq!(faults(&[policy(103, 100, "ro,nosuid")]), []);
        assert_eq!(faults(&[policy(103, 100, "rw,nosuid")]), [Fault::Writable(PAGE.to_owned())]);
        assert_eq!(faults(&[]), [missing()]);
        let other_claim = policy(103, 100, "ro").replace("shares/c-1", "shares/c-2");
        assert_eq!(faults(&[other_claim]), [masked()]);
        let other_disk = policy(103, 100, "ro").replace("0:25", "0:26");
        assert_eq!(faults(&[other_disk]), [masked()]);
        let file_of_the_image = "103 100 0:50 /forged /run/divvy/c-1/s-1/policy ro - overlay overlay rw";
        assert_eq!(faults(&[file_of_the_image.to_owned()]), [masked()]);
    }

    #[test]
    fn mount_over_or_above_the_page_masks_it() {
        let ours = policy(103, 100, "ro");
        let over = |point: &str, parent: u32| format!("104 {parent} 0:60 / {point} rw - tmpfs tmpfs rw");
        assert_eq!(faults(&[ours.clone(), over(PAGE, 103)]), [masked()]);
        let account = Fault::Masked("/run/divvy/c-1/s-1/account".to_owned());
        for above in ["/run/divvy/c-1/s-1", "/run/divvy/c-1", "/run/divvy", "/run"] {
            assert_eq!(faults(&[ours.clone(), over(above, 100)]), [masked(), account.clone()], "{above}");
        }
        // Mounts elsewhere do not matter.
        assert_eq!(faults(&[ours.clone(), over("/run/divvy-not", 100)]), []);
        assert_eq!(faults(&[ours, over("/home", 100)]), []);
    }

    #[test]
    fn page_below_another_mount_is_found() {
        let run = "103 100 0:70 / /run rw - tmpfs tmpfs rw".to_owned();
        let below = [run, policy(104, 103, "ro"), account(105, 103)];
        let text: String = [ROOT.to_owned()].iter().chain(&below).map(|line| format!("{line}\n")).collect();
        assert_eq!(check(&parse(&text), &page()), []);
    }

    #[test]
    fn moved_pages_are_still_recognized() {
        let moved =
            "103 100 0:25 /divvy/shares/c-1/s-1/policy /run/elsewhere/c-1/s-1/policy ro - tmpfs tmpfs rw";
        let mounts = parse(&format!("{ROOT}\n{moved}\n"));
        assert!(has(&mounts, &page()));
        let gone = ["policy", "account"].map(|file| format!("/run/divvy/c-1/s-1/{file}"));
        assert_eq!(
            check(&mounts, &page()),
            [Fault::Masked(gone[0].clone()), Fault::Missing(gone[1].clone())]
        );
    }

    #[test]
    fn forged_pages_are_detected() {
        let forged = |more: &[&str]| {
            let more: Vec<String> = more.iter().map(|line| (*line).to_owned()).collect();
            let mounts = parse(&lines(&more));
            super::forged(&mounts, &[&page()])
        };
        let ours = policy(103, 100, "ro");
        let library = "104 100 0:25 /divvy/lib/ab/libdivvy.so /run/divvy/lib/libdivvy.so ro - tmpfs tmpfs rw";
        assert_eq!(forged(&[&ours, library]), []);
        let config_map = "105 100 8:1 /kubelet/pods/p/volumes/x /run/divvy/c-9/s-9/policy ro - ext4 d rw";
        assert_eq!(forged(&[&ours, config_map]), [Fault::Forged("/run/divvy/c-9/s-9/policy".to_owned())]);
    }

    #[test]
    fn too_many_mounts_are_a_fault() {
        let ours = policy(103, 100, "ro");
        let many = |count: u32, point: &str| -> Vec<String> {
            let more = (0..count).map(|at| format!("{} 103 0:60 / {point} rw - tmpfs tmpfs rw", 200 + at));
            [ours.clone()].into_iter().chain(more).collect()
        };
        assert_eq!(faults(&many(5000, "/run/divvy/x")), [Fault::TooManyMounts]);
        assert_eq!(faults(&many(5000, "/home/x")), []);
        assert_eq!(faults(&many(50_000, "/home/x")), [Fault::TooManyMounts]);
        assert!(
            has(&parse(&lines(&many(5000, "/run/divvy/x"))), &page()),
            "the process still belongs to the share"
        );
        let long = format!("/run/divvy/{}", "x/".repeat(2000));
        assert_eq!(faults(&many(4, &long)), []);
        assert_eq!(faults(&many(5, &long)), [Fault::TooManyMounts]);
        assert!(super::forged(&parse(&lines(&many(4, &long))), &[&page()]).len() <= 4);
        assert_eq!(super::forged(&parse(&lines(&many(5000, &long))), &[&page()]), []);
    }

    #[test]
    fn mount_cycles_resolve_to_nothing() {
        let ours = policy(103, 100, "ro");
        let mount =
            |id: u32, parent: u32, point: &str| format!("{id} {parent} 0:60 / {point} rw - tmpfs tmpfs rw");
        let all = [masked(), Fault::Masked("/run/divvy/c-1/s-1/account".to_owned())];
        assert_eq!(faults(&[ours.clone(), mount(104, 103, PAGE), mount(103, 104, PAGE)]), [masked()]);
        assert_eq!(faults(&[ours.clone(), mount(104, 100, "/"), mount(100, 104, "/")]), all);
        assert_eq!(
            faults(&[ours, mount(104, 100, "/run"), mount(105, 104, "/run"), mount(104, 105, "/run")]),
            all
        );
    }

    #[test]
    fn escaped_characters_are_decoded() {
        let mounts = parse("1 0 0:1 /a\\040b /run/divvy/x\\134y rw - t t rw\n");
        assert_eq!(
            (mounts.list[0].root.as_str(), mounts.list[0].point.as_str()),
            ("/a b", "/run/divvy/x\\y")
        );
    }

    /// A pattern of lines that are valid, or nearly.
    const MOUNTINFO: &str = "(([0-9]{1,2} [0-9]{1,2} 0:25 [/a-z\\\\0-9]{0,9} \
                             (/|/run|/run/divvy(/c-1(/s-1)?)?) ro?,x)?\\n?){0,9}";

    proptest! {
        #[test]
        fn mount_parsing_never_panics(text in MOUNTINFO) {
            let mounts = parse(&text);
            let _ = check(&mounts, &page());
            let _ = super::forged(&mounts, &[&page()]);
        }
    }
}
