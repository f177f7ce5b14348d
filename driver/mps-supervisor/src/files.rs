//! The files of one target: `desired.json` is read and validated, `actual.json` is replaced by rename.
//!
//! An unreadable or invalid file never stops the supervisor: it keeps the target as it is.

use divvy_api::mps::{ACTUAL, Actual, DESIRED, Desired, FORMAT};
use serde::de::DeserializeOwned;
use std::fs::{self, File, Permissions};
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Bytes read of a file; both files are far smaller.
const MAX_FILE_BYTES: u64 = 64 * 1024;

/// A file cannot be read or is invalid.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FileError {
    #[error("{name} cannot be read: {cause}")]
    Read { name: &'static str, cause: io::Error },
    #[error("{name} is not valid JSON of this format: {cause}")]
    Parse { name: &'static str, cause: serde_json::Error },
    #[error("{name} has format {found}, but this supervisor reads up to {FORMAT}; upgrade the supervisor")]
    Format { name: &'static str, found: u32 },
    #[error("{DESIRED} has an invalid value: {what}")]
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

    /// Creates the missing directories. Clients of all users connect to the pipe and share memory
    /// with the server, so these two are world-writable. The sticky bit stops a user from removing
    /// the files of another.
    pub(crate) fn create(&self) -> io::Result<()> {
        for (dir, mode) in [(&self.pipe, 0o1777), (&self.log, 0o755), (&self.shm, 0o1777), (&self.lib, 0o755)]
        {
            if !dir.is_dir() {
                fs::create_dir(dir)?;
                fs::set_permissions(dir, Permissions::from_mode(mode))?;
            }
        }
        Ok(())
    }

    /// The desired state; `None` if the daemon must stop.
    pub(crate) fn desired(&self) -> Result<Option<Desired>, FileError> {
        let desired: Option<Desired> = read(&self.dir, DESIRED)?;
        if let Some(desired) = &desired {
            check(desired)?;
        }
        Ok(desired)
    }

    /// The state written last, by this supervisor or an earlier one.
    pub(crate) fn actual(&self) -> Result<Option<Actual>, FileError> {
        read(&self.dir, ACTUAL)
    }

    pub(crate) fn write_actual(&self, actual: &Actual) -> io::Result<()> {
        let part = self.dir.join("actual.part");
        fs::write(&part, serde_json::to_vec(actual)?)?;
        fs::rename(&part, self.dir.join(ACTUAL))
    }

    /// Whether a supervisor wrote a state here, so a daemon was started before.
    pub(crate) fn had_daemon(&self) -> bool {
        self.dir.join(ACTUAL).exists()
    }

    /// Removes the files of a stopped daemon and then the directory.
    ///
    /// # Errors
    /// `DirectoryNotEmpty` if other files are in it, for example a new `desired.json`.
    pub(crate) fn remove(&self) -> io::Result<()> {
        let ignore_missing = |removed: io::Result<()>| match removed {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        };
        for dir in [&self.pipe, &self.log, &self.shm, &self.lib] {
            ignore_missing(crate::tree::remove(dir))?;
        }
        for name in [ACTUAL, "actual.part", "desired.part"] {
            ignore_missing(fs::remove_file(self.dir.join(name)))?;
        }
        ignore_missing(fs::remove_dir(&self.dir))
    }
}

fn read<T: DeserializeOwned>(dir: &Path, name: &'static str) -> Result<Option<T>, FileError> {
    let failed = |cause| FileError::Read { name, cause };
    let file = match File::open(dir.join(name)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file.map_err(failed)?,
    };
    let mut bytes = Vec::new();
    file.take(MAX_FILE_BYTES).read_to_end(&mut bytes).map_err(failed)?;
    // Check the format first: a later format may have other fields.
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

/// Validates values before they are passed to a program: the device must be a UUID, and limits must
/// be in the range that the daemon accepts.
fn check(desired: &Desired) -> Result<(), FileError> {
    let wrong = |what: String| Err(FileError::Value { what });
    let uuid = desired.device.strip_prefix("GPU-").or_else(|| desired.device.strip_prefix("MIG-"));
    let good = |rest: &str| {
        !rest.is_empty()
            && rest.len() <= 128
            && rest.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_/.".contains(&byte))
    };
    if !uuid.is_some_and(good) {
        return wrong(format!("device {:?} is not a GPU or MIG UUID", desired.device));
    }
    if let Some(threads) = desired.thread_percentage
        && !(1..=100).contains(&threads)
    {
        return wrong(format!("threadPercentage {threads} is not from 1 to 100"));
    }
    if desired.memory_mib == Some(0) {
        return wrong("memoryMib 0 leaves no memory".to_owned());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // A test may panic.

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
    fn desired_is_parsed_or_rejected_with_a_reason() {
        check_desired(r#"{"format":1,"device":"GPU-1a","later":true}"#, Ok("GPU-1a"));
        check_desired(r#"{"format":1,"device":"MIG-1a","threadPercentage":100,"memoryMib":1}"#, Ok("MIG-1a"));
        check_desired("", Err("desired.json is not valid JSON"));
        check_desired(r#"{"format":2,"gpu":"GPU-1a"}"#, Err("has format 2"));
        check_desired(r#"{"format":1,"device":"0"}"#, Err("device \"0\""));
        check_desired(r#"{"format":1,"device":"GPU-1\nquit"}"#, Err("has an invalid value"));
        check_desired(r#"{"format":1,"device":"GPU-1","threadPercentage":0}"#, Err("threadPercentage 0"));
        check_desired(r#"{"format":1,"device":"GPU-1","threadPercentage":101}"#, Err("threadPercentage 101"));
        check_desired(r#"{"format":1,"device":"GPU-1","memoryMib":0}"#, Err("memoryMib 0"));
        check_desired(
            r#"{"format":1,"device":"GPU-1","memoryMib":-1}"#,
            Err("not valid JSON of this format"),
        );
        assert!(Dirs::new(Path::new("/nonexistent")).desired().unwrap().is_none());
    }

    proptest! {
        #[test]
        fn garbage_is_rejected_without_a_panic(text in prop::collection::vec(any::<u8>(), 0..400)) {
            prop_assert!(desired_of(&text).is_err());
        }

        #[test]
        fn accepted_values_are_safe_as_arguments(
            device in "(GPU-|MIG-)?[ -~\\n]{0,12}", threads in any::<u32>()
        ) {
            let text = serde_json::json!({ "format": 1, "device": device, "threadPercentage": threads });
            if let Ok(Some(desired)) = desired_of(text.to_string().as_bytes()) {
                prop_assert!(!desired.device.contains(|c: char| c.is_whitespace() || c == ','));
                prop_assert!((1..=100).contains(&desired.thread_percentage.unwrap()));
            }
        }
    }

    #[test]
    fn only_files_of_the_daemon_are_removed() {
        let root = tempfile::tempdir().unwrap();
        let dirs = Dirs::new(&root.path().join("GPU-1"));
        fs::create_dir(&dirs.dir).unwrap();
        dirs.create().unwrap();
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
