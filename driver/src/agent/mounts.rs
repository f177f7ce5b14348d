//! What is mounted where a process looks for the pages of its shares.
//!
//! Mounts are a tree, and the one that a path leads to is found as the kernel finds
//! it: from the root, name by name, into whatever is mounted last on each. So a
//! mount over the page, over a directory above it, or in its place is seen, and a
//! mount that another one hides counts for nothing. Source: `Documentation/
//! filesystems/proc.rst`, section 3.5.

use crate::shares::{ACCOUNT, IN_CONTAINER, POLICY};
use std::borrow::Cow;
use std::collections::BTreeSet;

/// Every page lies below such a directory of the host.
const SHARES: &str = "/shares/";

/// A line of `/proc/<pid>/mountinfo`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mount {
    id: u32,
    parent: u32,
    /// Major and minor number of the file system.
    pub(super) device: (u32, u32),
    /// Where in its file system it begins.
    pub(super) root: String,
    /// Where it is, as the process sees it.
    pub(super) point: String,
    pub(super) read_only: bool,
}

/// The mounts of a process that matter to its pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mounts {
    list: Vec<Mount>,
    /// There are no others.
    all: bool,
}

/// Where a page is on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Page {
    /// Of the file system.
    pub(super) device: (u32, u32),
    /// `<claim UID>/<shareID>`.
    pub(super) share: String,
}

/// What is wrong with what a process sees of a share.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Trouble {
    /// Nothing is mounted at that path.
    Missing(String),
    /// Something else is mounted at that path or above it.
    Covered(String),
    /// The policy page can be written there.
    Writable(String),
    /// A page that is none of the host's.
    Forged(String),
    /// Whoever mounts so much wants nobody to find his way.
    Crowded,
}

/// So much of the file is read: honest containers have a hundredth of it, and a tenant may
/// make a hundred thousand mounts (`/proc/sys/fs/mount-max`).
pub(super) const LARGEST: usize = 1 << 20;
/// More pages than any container has.
const MOST: usize = 256;
/// Bytes of paths that are kept of a process: honest ones have 500 for each share. A tenant has a thousand processes and
/// mounts of 4 KiB, and all of it is kept at once.
const KEPT: usize = 16 << 10;

/// The mounts on which anything below [`IN_CONTAINER`] can depend, and pages wherever they are: the container's root
/// may rename a directory above them.
pub(super) fn parse(mountinfo: &str) -> Mounts {
    let (mut list, mut kept, mut all) = (Vec::new(), 0, mountinfo.len() < LARGEST);
    for mount in mountinfo.lines().filter_map(Mount::parse) {
        kept += mount.root.len() + mount.point.len();
        if list.len() == MOST || kept > KEPT {
            all = false;
            break;
        }
        list.push(mount);
    }
    Mounts { list, all }
}

/// Above, at or below the directory of pages.
fn matters(point: &str) -> bool {
    is_below(IN_CONTAINER, point) || is_below(point, IN_CONTAINER)
}

/// Whether a path is another or below it.
fn is_below(path: &str, above: &str) -> bool {
    let above = above.trim_end_matches('/');
    path.strip_prefix(above).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

impl Mount {
    /// None of a line that is none or does not matter, as nearly all do not.
    fn parse(line: &str) -> Option<Self> {
        let mut fields = line.split(' ');
        let (id, parent, device) = (fields.next()?, fields.next()?, fields.next()?);
        let (root, point) = (unescape(fields.next()?), unescape(fields.next()?));
        if !matters(&point) && !root.contains(SHARES) {
            return None;
        }
        let (id, parent) = (id.parse().ok()?, parent.parse().ok()?);
        let (major, minor) = device.split_once(':')?;
        let device = (major.parse().ok()?, minor.parse().ok()?);
        let (root, point) = (root.into_owned(), point.into_owned());
        let read_only = fields.next()?.split(',').any(|option| option == "ro");
        Some(Self { id, parent, device, root, point, read_only })
    }

    /// Whether it is that file of that page.
    fn is(&self, page: &Page, file: &str) -> bool {
        let root = self.root.strip_suffix(file).and_then(|root| root.strip_suffix('/'));
        let share = root.and_then(|root| root.strip_suffix(page.share.as_str()));
        self.device == page.device && share.is_some_and(|dir| dir.ends_with(SHARES))
    }
}

/// Space, tab, newline and backslash are written in octal.
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

/// The mount that a path leads to. Mounts that lead round in a circle lead nowhere: the kernel has no such, but the file is
/// read in pieces, and a number is used anew as soon as its mount is gone.
fn top<'a>(mounts: &'a [Mount], path: &str) -> Option<&'a Mount> {
    let known: BTreeSet<u32> =
        mounts.iter().filter(|mount| mount.parent != mount.id).map(|mount| mount.id).collect();
    let (mut here, mut steps): (Option<&Mount>, usize) = (None, 0);
    let ends = path.match_indices('/').map(|(at, _)| at.max(1)).skip(1).chain([path.len()]);
    for name in std::iter::once("/").chain(ends.filter_map(|end| path.get(..end))) {
        // As often as something is mounted there on what was mounted there before.
        while let Some(next) = mounts.iter().find(|mount| {
            let is_child = match here {
                // What the root is mounted on is not listed, nor what lies outside a chroot.
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

/// What is wrong with the pages of a share as a process with these mounts sees them.
pub(super) fn check(mounts: &Mounts, page: &Page) -> Vec<Trouble> {
    if !mounts.all {
        return vec![Trouble::Crowded];
    }
    let mounts = mounts.list.as_slice();
    let look = |file: &str| {
        let path = format!("{IN_CONTAINER}/{}/{file}", page.share);
        match top(mounts, &path) {
            Some(mount) if mount.is(page, file) && mount.point == path => {
                (file == POLICY && !mount.read_only).then_some(Trouble::Writable(path))
            }
            // On the way to the page lies something that was mounted there.
            Some(mount) if is_below(&mount.point, IN_CONTAINER) => Some(Trouble::Covered(path)),
            _ => match mounts.iter().any(|mount| mount.is(page, file)) {
                true => Some(Trouble::Covered(path)),
                false => Some(Trouble::Missing(path)),
            },
        }
    };
    [POLICY, ACCOUNT].into_iter().filter_map(look).collect()
}

/// Pages that a process sees and that are none of these: somebody made them up. Nobody looks through too many mounts.
pub(super) fn forged(mounts: &Mounts, pages: &[&Page]) -> Vec<Trouble> {
    if !mounts.all {
        return Vec::new();
    }
    let mounts = mounts.list.as_slice();
    let made_up = |mount: &&Mount| {
        let Some(rest) = mount.point.strip_prefix(IN_CONTAINER) else { return false };
        let parts: Vec<&str> = rest.split('/').skip(1).collect();
        // Below the library's directory, or above every page.
        let [claim, ..] = parts[..] else { return false };
        if claim == "lib" {
            return false;
        }
        let ours = pages.iter().any(|page| [POLICY, ACCOUNT].iter().any(|file| mount.is(page, file)));
        !ours && top(mounts, &mount.point).is_some_and(|top| top.id == mount.id)
    };
    mounts.iter().filter(made_up).map(|mount| Trouble::Forged(mount.point.clone())).collect()
}

/// Whether the policy page of a share is among the mounts, hidden or not.
pub(super) fn has(mounts: &Mounts, page: &Page) -> bool {
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
            "{id} {parent} 0:25 /divvy/shares/c-1/s-1/account /run/divvy/c-1/s-1/account rw,nosuid - tmpfs tmpfs rw"
        )
    }

    fn covered() -> Trouble {
        Trouble::Covered(PAGE.to_owned())
    }

    fn missing() -> Trouble {
        Trouble::Missing(PAGE.to_owned())
    }

    fn lines(more: &[String]) -> String {
        let head = [ROOT.to_owned(), PROC.to_owned(), account(102, 100)];
        head.iter().chain(more).map(|line| format!("{line}\n")).collect()
    }

    fn trouble(more: &[String]) -> Vec<Trouble> {
        check(&parse(&lines(more)), &page())
    }

    #[test]
    fn the_page_of_the_host_is_what_must_be_mounted_read_only() {
        assert_eq!(trouble(&[policy(103, 100, "ro,nosuid")]), []);
        assert_eq!(trouble(&[policy(103, 100, "rw,nosuid")]), [Trouble::Writable(PAGE.to_owned())]);
        assert_eq!(trouble(&[]), [missing()]);
        let other_claim = policy(103, 100, "ro").replace("shares/c-1", "shares/c-2");
        assert_eq!(trouble(&[other_claim]), [covered()]);
        let other_disk = policy(103, 100, "ro").replace("0:25", "0:26");
        assert_eq!(trouble(&[other_disk]), [covered()]);
        let file_of_the_image = "103 100 0:50 /forged /run/divvy/c-1/s-1/policy ro - overlay overlay rw";
        assert_eq!(trouble(&[file_of_the_image.to_owned()]), [covered()]);
    }

    #[test]
    fn what_is_mounted_over_the_page_or_above_it_covers_it() {
        let ours = policy(103, 100, "ro");
        let over = |point: &str, parent: u32| format!("104 {parent} 0:60 / {point} rw - tmpfs tmpfs rw");
        assert_eq!(trouble(&[ours.clone(), over(PAGE, 103)]), [covered()]);
        let account = Trouble::Covered("/run/divvy/c-1/s-1/account".to_owned());
        for above in ["/run/divvy/c-1/s-1", "/run/divvy/c-1", "/run/divvy", "/run"] {
            assert_eq!(trouble(&[ours.clone(), over(above, 100)]), [covered(), account.clone()], "{above}");
        }
        // Below the page's own mounts is nothing, and elsewhere does not matter.
        assert_eq!(trouble(&[ours.clone(), over("/run/divvy-not", 100)]), []);
        assert_eq!(trouble(&[ours, over("/home", 100)]), []);
    }

    #[test]
    fn a_page_mounted_into_a_directory_that_is_a_mount_itself_is_seen() {
        let run = "103 100 0:70 / /run rw - tmpfs tmpfs rw".to_owned();
        let below = [run, policy(104, 103, "ro"), account(105, 103)];
        let text: String = [ROOT.to_owned()].iter().chain(&below).map(|line| format!("{line}\n")).collect();
        assert_eq!(check(&parse(&text), &page()), []);
    }

    #[test]
    fn pages_that_were_moved_away_are_still_known() {
        let moved =
            "103 100 0:25 /divvy/shares/c-1/s-1/policy /run/elsewhere/c-1/s-1/policy ro - tmpfs tmpfs rw";
        let mounts = parse(&format!("{ROOT}\n{moved}\n"));
        assert!(has(&mounts, &page()));
        let gone = ["policy", "account"].map(|file| format!("/run/divvy/c-1/s-1/{file}"));
        assert_eq!(
            check(&mounts, &page()),
            [Trouble::Covered(gone[0].clone()), Trouble::Missing(gone[1].clone())]
        );
    }

    #[test]
    fn made_up_pages_are_told_from_the_hosts() {
        let forged = |more: &[&str]| {
            let more: Vec<String> = more.iter().map(|line| (*line).to_owned()).collect();
            let mounts = parse(&lines(&more));
            super::forged(&mounts, &[&page()])
        };
        let ours = policy(103, 100, "ro");
        let library = "104 100 0:25 /divvy/lib/ab/libdivvy.so /run/divvy/lib/libdivvy.so ro - tmpfs tmpfs rw";
        assert_eq!(forged(&[&ours, library]), []);
        let config_map = "105 100 8:1 /kubelet/pods/p/volumes/x /run/divvy/c-9/s-9/policy ro - ext4 d rw";
        assert_eq!(forged(&[&ours, config_map]), [Trouble::Forged("/run/divvy/c-9/s-9/policy".to_owned())]);
    }

    #[test]
    fn who_mounts_more_than_can_be_looked_through_is_found() {
        let ours = policy(103, 100, "ro");
        let many = |count: u32, point: &str| -> Vec<String> {
            let more = (0..count).map(|at| format!("{} 103 0:60 / {point} rw - tmpfs tmpfs rw", 200 + at));
            [ours.clone()].into_iter().chain(more).collect()
        };
        assert_eq!(trouble(&many(5000, "/run/divvy/x")), [Trouble::Crowded]);
        assert_eq!(trouble(&many(5000, "/home/x")), []);
        assert_eq!(trouble(&many(50_000, "/home/x")), [Trouble::Crowded]);
        assert!(has(&parse(&lines(&many(5000, "/run/divvy/x"))), &page()), "whose it is, is known");
        let long = format!("/run/divvy/{}", "x/".repeat(2000));
        assert_eq!(trouble(&many(4, &long)), []);
        assert_eq!(trouble(&many(5, &long)), [Trouble::Crowded]);
        assert!(super::forged(&parse(&lines(&many(4, &long))), &[&page()]).len() <= 4);
        assert_eq!(super::forged(&parse(&lines(&many(5000, &long))), &[&page()]), []);
    }

    #[test]
    fn mounts_that_lead_round_in_a_circle_lead_nowhere() {
        let ours = policy(103, 100, "ro");
        let mount =
            |id: u32, parent: u32, point: &str| format!("{id} {parent} 0:60 / {point} rw - tmpfs tmpfs rw");
        let all = [covered(), Trouble::Covered("/run/divvy/c-1/s-1/account".to_owned())];
        assert_eq!(trouble(&[ours.clone(), mount(104, 103, PAGE), mount(103, 104, PAGE)]), [covered()]);
        assert_eq!(trouble(&[ours.clone(), mount(104, 100, "/"), mount(100, 104, "/")]), all);
        assert_eq!(
            trouble(&[ours, mount(104, 100, "/run"), mount(105, 104, "/run"), mount(104, 105, "/run")]),
            all
        );
    }

    #[test]
    fn a_name_with_a_space_is_one_name() {
        let mounts = parse("1 0 0:1 /a\\040b /run/divvy/x\\134y rw - t t rw\n");
        assert_eq!(
            (mounts.list[0].root.as_str(), mounts.list[0].point.as_str()),
            ("/a b", "/run/divvy/x\\y")
        );
    }

    proptest! {
        #[test]
        fn no_mounts_make_it_panic(text in "(([0-9]{1,2} [0-9]{1,2} 0:25 [/a-z\\\\0-9]{0,9} (/|/run|/run/divvy(/c-1(/s-1)?)?) ro?,x)?\\n?){0,9}") {
            let mounts = parse(&text);
            let _ = check(&mounts, &page());
            let _ = super::forged(&mounts, &[&page()]);
        }
    }
}
