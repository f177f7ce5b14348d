//! The files of one target: what is wanted is read and checked, what there is is
//! written by rename, and what the keeper made is removed.
//!
//! The node daemon writes the one and trusts the other, but nothing that is in
//! these files can stop the keeper: what it does not understand it leaves alone.

use divvy_api::mps::{ACTUAL, Actual, DESIRED, Desired, FORMAT};
use serde::de::DeserializeOwned;
use std::fs::{self, File, Permissions};
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// No file of the contract is larger.
const MOST: u64 = 64 * 1024;

/// A file that cannot be read or understood.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FileError {
    #[error("{name} cannot be read: {cause}")]
    Read { name: &'static str, cause: io::Error },
    #[error("{name} cannot be understood: {cause}")]
    Parse { name: &'static str, cause: serde_json::Error },
    #[error("{name} has format {found}, this keeper knows {FORMAT}; upgrade the keeper")]
    Format { name: &'static str, found: u32 },
    #[error("{DESIRED} asks for {what}, which no daemon can have")]
    Value { what: String },
}

/// The directories and files of a target.
#[derive(Clone, Debug)]
pub(crate) struct Dirs {
    pub(crate) dir: PathBuf,
    pub(crate) pipe: PathBuf,
    pub(crate) log: PathBuf,
    pub(crate) shm: PathBuf,
    /// Links to the GPU driver's libraries, and to nothing else.
    pub(crate) lib: PathBuf,
}

impl Dirs {
    pub(crate) fn new(dir: &Path) -> Self {
        let below = |name| dir.join(name);
        Self {
            dir: dir.to_owned(),
            pipe: below("pipe"),
            log: below("log"),
            shm: below("shm"),
            lib: below("lib"),
        }
    }

    /// Makes what is not there. Clients of every user use the pipe and share memory with the server, so these two are
    /// open to all; the sticky bit keeps one from removing what another made.
    pub(crate) fn make(&self) -> io::Result<()> {
        for (dir, mode) in [(&self.pipe, 0o1777), (&self.log, 0o755), (&self.shm, 0o1777), (&self.lib, 0o755)]
        {
            if !dir.is_dir() {
                fs::create_dir(dir)?;
                fs::set_permissions(dir, Permissions::from_mode(mode))?;
            }
        }
        Ok(())
    }

    /// What is wanted, or none where the daemon is to end.
    pub(crate) fn desired(&self) -> Result<Option<Desired>, FileError> {
        let desired: Option<Desired> = read(&self.dir, DESIRED)?;
        if let Some(desired) = &desired {
            check(desired)?;
        }
        Ok(desired)
    }

    /// What was written last, by this keeper or another.
    pub(crate) fn actual(&self) -> Result<Option<Actual>, FileError> {
        read(&self.dir, ACTUAL)
    }

    pub(crate) fn write_actual(&self, actual: &Actual) -> io::Result<()> {
        let part = self.dir.join("actual.part");
        fs::write(&part, serde_json::to_vec(actual)?)?;
        fs::rename(&part, self.dir.join(ACTUAL))
    }

    /// Whether something is here that a keeper left: then a daemon ran here.
    pub(crate) fn used(&self) -> bool {
        self.dir.join(ACTUAL).exists()
    }

    /// Removes what belongs to a daemon that has ended, and the directory. It stays where something else is in it, a new
    /// wish above all.
    pub(crate) fn remove(&self) -> io::Result<()> {
        let gone = |removed: io::Result<()>| match removed {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        };
        for dir in [&self.pipe, &self.log, &self.shm, &self.lib] {
            gone(divvy_tree::remove(dir))?;
        }
        for name in [ACTUAL, "actual.part", "desired.part"] {
            gone(fs::remove_file(self.dir.join(name)))?;
        }
        gone(fs::remove_dir(&self.dir))
    }
}

fn read<T: DeserializeOwned>(dir: &Path, name: &'static str) -> Result<Option<T>, FileError> {
    let failed = |cause| FileError::Read { name, cause };
    let file = match File::open(dir.join(name)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file.map_err(failed)?,
    };
    let mut bytes = Vec::new();
    file.take(MOST).read_to_end(&mut bytes).map_err(failed)?;
    // The format first: a later one may have other fields.
    #[derive(serde::Deserialize)]
    struct Head {
        format: u32,
    }
    let parsed = |cause| FileError::Parse { name, cause };
    let Head { format } = serde_json::from_slice(&bytes).map_err(parsed)?;
    if format > FORMAT {
        return Err(FileError::Format { name, found: format });
    }
    serde_json::from_slice(&bytes).map(Some).map_err(parsed)
}

/// What is handed to a program is checked: the device is a UUID, limits are numbers that the daemon takes.
fn check(desired: &Desired) -> Result<(), FileError> {
    let wrong = |what: String| Err(FileError::Value { what });
    let uuid = desired.device.strip_prefix("GPU-").or_else(|| desired.device.strip_prefix("MIG-"));
    let good = |rest: &str| {
        !rest.is_empty()
            && rest.len() <= 128
            && rest.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_/.".contains(&byte))
    };
    if !uuid.is_some_and(good) {
        return wrong(format!("device {:?}", desired.device));
    }
    if let Some(threads) = desired.thread_percentage
        && !(1..=100).contains(&threads)
    {
        return wrong(format!("{threads} % of the threads"));
    }
    if desired.memory_mib == Some(0) {
        return wrong("0 MiB of memory".to_owned());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // A test that cannot go on stops here.

    use super::*;
    use proptest::prelude::*;

    fn desired_of(text: &[u8]) -> Result<Option<Desired>, FileError> {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(DESIRED), text).unwrap();
        Dirs::new(dir.path()).desired()
    }

    fn check_desired(text: &str, expected: Result<&str, &str>) {
        match (desired_of(text.as_bytes()), expected) {
            (Ok(Some(desired)), Ok(device)) => assert_eq!(desired.device, device),
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
            (got, expected) => panic!("{text}: {got:?} instead of {expected:?}"),
        }
    }

    #[test]
    fn a_wish_is_understood_or_the_reason_is_told() {
        check_desired(r#"{"format":1,"device":"GPU-1a","later":true}"#, Ok("GPU-1a"));
        check_desired(r#"{"format":1,"device":"MIG-1a","threadPercentage":100,"memoryMib":1}"#, Ok("MIG-1a"));
        check_desired("", Err("desired.json cannot be understood"));
        check_desired(r#"{"format":2,"gpu":"GPU-1a"}"#, Err("has format 2"));
        check_desired(r#"{"format":1,"device":"0"}"#, Err("device \"0\""));
        check_desired(r#"{"format":1,"device":"GPU-1\nquit"}"#, Err("which no daemon can have"));
        check_desired(r#"{"format":1,"device":"GPU-1","threadPercentage":0}"#, Err("0 % of the threads"));
        check_desired(r#"{"format":1,"device":"GPU-1","threadPercentage":101}"#, Err("101 %"));
        check_desired(r#"{"format":1,"device":"GPU-1","memoryMib":0}"#, Err("0 MiB"));
        check_desired(r#"{"format":1,"device":"GPU-1","memoryMib":-1}"#, Err("cannot be understood"));
        assert!(Dirs::new(Path::new("/nonexistent")).desired().unwrap().is_none());
    }

    proptest! {
        #[test]
        fn garbage_is_refused_and_never_more(text in prop::collection::vec(any::<u8>(), 0..400)) {
            prop_assert!(desired_of(&text).is_err());
        }

        #[test]
        fn what_passes_can_be_handed_to_a_program(device in "(GPU-|MIG-)?[ -~\\n]{0,12}", threads in any::<u32>()) {
            let wish = serde_json::json!({ "format": 1, "device": device, "threadPercentage": threads });
            if let Ok(Some(desired)) = desired_of(wish.to_string().as_bytes()) {
                prop_assert!(!desired.device.contains(|c: char| c.is_whitespace() || c == ','));
                prop_assert!((1..=100).contains(&desired.thread_percentage.unwrap()));
            }
        }
    }

    #[test]
    fn only_what_belongs_to_a_daemon_is_removed() {
        let root = tempfile::tempdir().unwrap();
        let dirs = Dirs::new(&root.path().join("GPU-1"));
        fs::create_dir(&dirs.dir).unwrap();
        dirs.make().unwrap();
        fs::write(dirs.pipe.join("control"), "").unwrap();
        fs::write(dirs.dir.join("foreign"), "kept").unwrap();
        assert!(dirs.remove().is_err());
        assert_eq!(fs::read(dirs.dir.join("foreign")).unwrap(), b"kept");
        assert!(!dirs.pipe.exists());
        fs::remove_file(dirs.dir.join("foreign")).unwrap();
        dirs.remove().unwrap();
        assert!(!dirs.dir.exists());
    }
}
