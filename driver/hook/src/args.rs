//! What the hook is told to do, on its command line: the CDI file of a claim is
//! the only caller, so there are four options and no more.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Names to make, with paths as the container sees them, and what a share takes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Links to make, sonames first: a link may point to a link.
    pub links: Vec<Link>,
    /// What the loader is to find, by name.
    pub entries: Vec<Entry>,
    /// Directory of the host for lists of libraries to preload, by container; see
    /// [`crate::preload`].
    pub preload: Option<PathBuf>,
    /// Directory of the host for cgroups, by container; see [`crate::cgroups`].
    pub cgroups: Option<PathBuf>,
}

/// A link and the name in its own directory that it leads to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    pub dir: PathBuf,
    pub name: String,
    pub target: String,
}

/// A name for the loader, and the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub dir: PathBuf,
    pub name: String,
}

/// Why the command line is refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArgsError {
    #[error(
        "unknown option {0:?}; there are --library PATH=SONAME, --link PATH=TARGET, --preload DIR and --cgroups DIR"
    )]
    Unknown(String),
    #[error("{0} needs an absolute path, not {1:?}")]
    Path(String, String),
    #[error("{0} needs PATH=NAME with an absolute path and a name without a slash, not {1:?}")]
    Value(String, String),
}

impl Work {
    /// Reads the options behind the program's name.
    pub fn parse(args: impl Iterator<Item = OsString>) -> Result<Self, ArgsError> {
        let mut work = Self::default();
        let mut dev_links = Vec::new();
        let mut args = args.map(|arg| arg.to_string_lossy().into_owned());
        while let Some(option) = args.next() {
            let value = args.next().unwrap_or_default();
            match option.as_str() {
                "--library" | "--link" => {}
                "--preload" => {
                    work.preload = Some(absolute(&option, value)?);
                    continue;
                }
                "--cgroups" => {
                    work.cgroups = Some(absolute(&option, value)?);
                    continue;
                }
                _ => return Err(ArgsError::Unknown(option)),
            }
            let (dir, name, other) =
                split(&value).ok_or_else(|| ArgsError::Value(option.clone(), value.clone()))?;
            if option == "--link" {
                dev_links.push(Link { dir, name, target: other });
                continue;
            }
            work.entries.push(Entry { dir: dir.clone(), name: other.clone() });
            if other != name {
                work.links.push(Link { dir, name: other, target: name });
            }
        }
        work.entries
            .extend(dev_links.iter().map(|link| Entry { dir: link.dir.clone(), name: link.name.clone() }));
        work.links.append(&mut dev_links);
        Ok(work)
    }

    /// The directories with libraries, each once, in order.
    pub fn dirs(&self) -> Vec<&Path> {
        let mut dirs: Vec<&Path> = Vec::new();
        for entry in &self.entries {
            if !dirs.contains(&entry.dir.as_path()) {
                dirs.push(&entry.dir);
            }
        }
        dirs
    }
}

fn absolute(option: &str, value: String) -> Result<PathBuf, ArgsError> {
    match value.starts_with('/') {
        true => Ok(value.into()),
        false => Err(ArgsError::Path(option.to_owned(), value)),
    }
}

/// `/dir/name=other`.
fn split(value: &str) -> Option<(PathBuf, String, String)> {
    let (path, other) = value.split_once('=')?;
    let (dir, name) = path.rsplit_once('/')?;
    let plain =
        |name: &str| !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\0', '\n']);
    let ok = dir.starts_with('/') && !dir.contains(['\0', '\n']) && plain(name) && plain(other);
    ok.then(|| (PathBuf::from(dir), name.to_owned(), other.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> Result<Work, ArgsError> {
        Work::parse(args.iter().map(|arg| OsString::from(*arg)))
    }

    #[test]
    fn a_library_is_a_link_and_an_entry() {
        let work =
            parse(&["--link", "/l/libc.so=libc.so.1", "--library", "/l/libc.so.1.2=libc.so.1"]).unwrap();
        let names: Vec<_> =
            work.links.iter().map(|link| (link.name.as_str(), link.target.as_str())).collect();
        assert_eq!(names, [("libc.so.1", "libc.so.1.2"), ("libc.so", "libc.so.1")]);
        let names: Vec<_> = work.entries.iter().map(|entry| entry.name.as_str()).collect();
        assert_eq!(names, ["libc.so.1", "libc.so"]);
        assert_eq!(work.dirs(), [Path::new("/l")]);
    }

    #[test]
    fn a_library_that_is_its_own_soname_needs_no_link() {
        let work = parse(&["--library", "/l/libx.so.1.2=libx.so.1.2"]).unwrap();
        assert_eq!((work.links.len(), work.entries.len()), (0, 1));
    }

    #[test]
    fn a_share_names_directories_of_the_host() {
        let work = parse(&["--preload", "/run/p", "--cgroups", "/run/c"]).unwrap();
        assert_eq!((work.preload, work.cgroups), (Some("/run/p".into()), Some("/run/c".into())));
        assert!(work.entries.is_empty());
    }

    #[test]
    fn what_is_not_a_path_and_a_name_is_refused() {
        for args in [
            &["--wrong"][..],
            &["--link"],
            &["--link", "/l/x"],
            &["--link", "l/x=y"],
            &["--link", "/l/x=../y"],
            &["--link", "/l/..=y"],
            &["--library", "/l/=y"],
            &["--library", "/l\n/x=y"],
            &["--preload"],
            &["--preload", "run"],
            &["--cgroups", ""],
        ] {
            assert!(parse(args).is_err(), "{args:?}");
        }
    }
}
