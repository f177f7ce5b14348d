//! The command line of the hook. Only the CDI file of a claim calls it.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Names to create, with paths as the container sees them, and directories for a share.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HookArgs {
    /// Links to create, sonames first, as a link may point to a link.
    pub links: Vec<Link>,
    /// Names that the loader must find.
    pub entries: Vec<Entry>,
    /// Host directory of preload lists, one file per container; see [`crate::preload`].
    pub preload: Option<PathBuf>,
    /// Host directory of cgroup files, one per container; see [`crate::report`].
    pub cgroups: Option<PathBuf>,
    /// Host directory with the first process of each container; see [`crate::report`].
    pub process: Option<PathBuf>,
}

/// A symbolic link and its target in the same directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    pub dir: PathBuf,
    pub name: String,
    pub target: String,
}

/// A name for the loader, and the directory of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub dir: PathBuf,
    pub name: String,
}

/// Why the command line is rejected.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArgsError {
    #[error(
        "unknown option {0:?}; use --library PATH=SONAME, --link PATH=TARGET, --preload DIR, --cgroups DIR \
         or --process DIR"
    )]
    Unknown(String),
    #[error("{0} needs an absolute path, not {1:?}")]
    Path(String, String),
    #[error("{0} needs PATH=NAME with an absolute path and a name without a slash, not {1:?}")]
    Value(String, String),
}

impl HookArgs {
    /// Parses the arguments after the program's name.
    pub fn parse(args: impl Iterator<Item = OsString>) -> Result<Self, ArgsError> {
        let mut parsed = Self::default();
        let mut dev_links = Vec::new();
        let mut args = args.map(|arg| arg.to_string_lossy().into_owned());
        while let Some(option) = args.next() {
            let value = args.next().unwrap_or_default();
            match option.as_str() {
                "--library" | "--link" => {}
                "--preload" => {
                    parsed.preload = Some(absolute(&option, value)?);
                    continue;
                }
                "--cgroups" => {
                    parsed.cgroups = Some(absolute(&option, value)?);
                    continue;
                }
                "--process" => {
                    parsed.process = Some(absolute(&option, value)?);
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
            parsed.entries.push(Entry { dir: dir.clone(), name: other.clone() });
            if other != name {
                parsed.links.push(Link { dir, name: other, target: name });
            }
        }
        parsed
            .entries
            .extend(dev_links.iter().map(|link| Entry { dir: link.dir.clone(), name: link.name.clone() }));
        parsed.links.append(&mut dev_links);
        Ok(parsed)
    }

    /// The directories with libraries, without duplicates, in order.
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

/// Splits `/dir/name=other`.
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

    fn parse(args: &[&str]) -> Result<HookArgs, ArgsError> {
        HookArgs::parse(args.iter().map(|arg| OsString::from(*arg)))
    }

    #[test]
    fn library_gets_a_link_and_an_entry() {
        let args =
            parse(&["--link", "/l/libc.so=libc.so.1", "--library", "/l/libc.so.1.2=libc.so.1"]).unwrap();
        let names: Vec<_> =
            args.links.iter().map(|link| (link.name.as_str(), link.target.as_str())).collect();
        assert_eq!(names, [("libc.so.1", "libc.so.1.2"), ("libc.so", "libc.so.1")]);
        let names: Vec<_> = args.entries.iter().map(|entry| entry.name.as_str()).collect();
        assert_eq!(names, ["libc.so.1", "libc.so"]);
        assert_eq!(args.dirs(), [Path::new("/l")]);
    }

    #[test]
    fn library_named_by_its_soname_needs_no_link() {
        let args = parse(&["--library", "/l/libx.so.1.2=libx.so.1.2"]).unwrap();
        assert_eq!((args.links.len(), args.entries.len()), (0, 1));
    }

    #[test]
    fn share_options_take_host_directories() {
        let args = parse(&["--preload", "/run/p", "--cgroups", "/run/c", "--process", "/run/r"]).unwrap();
        assert_eq!(args.process, Some("/run/r".into()));
        assert_eq!((args.preload, args.cgroups), (Some("/run/p".into()), Some("/run/c".into())));
        assert!(args.entries.is_empty());
    }

    #[test]
    fn invalid_paths_and_names_are_rejected() {
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
