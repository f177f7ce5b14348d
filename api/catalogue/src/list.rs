//! Lists of GPUs such as `8xH100-SXM5-80GB,2xL4`.

use crate::{Model, NoSuchModel, find};

/// The text is no list of GPUs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ListError {
    #[error("invalid entry {part:?} in the GPU list; the format is 8xH100-SXM5-80GB,2xL4")]
    Entry { part: String },
    #[error(transparent)]
    Model(#[from] NoSuchModel),
    #[error("{count} GPUs are too many; the GPU driver supports at most {MAX_GPUS}")]
    TooMany { count: usize },
}

/// Number of GPUs of a node in the GPU driver's table of capabilities.
pub const MAX_GPUS: usize = 32;

/// Parses a list into one model for each GPU.
pub fn parse_list(list: &str) -> Result<Vec<Model>, ListError> {
    let mut models = Vec::new();
    for part in list.split(',').map(str::trim) {
        let bad = || ListError::Entry { part: part.to_owned() };
        // A model name may begin with a digit, but not with digits and an x.
        let (count, name) = match part.split_once('x') {
            Some((count, name)) if !count.is_empty() && count.bytes().all(|byte| byte.is_ascii_digit()) => {
                (count.parse::<usize>().map_err(|_| bad())?, name)
            }
            _ => (1, part),
        };
        if name.is_empty() || count == 0 {
            return Err(bad());
        }
        let model = find(name)?;
        let total = models.len().saturating_add(count);
        if total > MAX_GPUS {
            return Err(ListError::TooMany { count: total });
        }
        models.resize(total, model);
    }
    Ok(models)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_have_counts_and_unique_prefixes() {
        let keys = |list: &str| -> Result<Vec<String>, ListError> {
            Ok(parse_list(list)?.iter().map(|model| model.row().key.clone()).collect())
        };
        assert_eq!(keys("2xT4, H200"), Ok(["T4", "T4", "H200-SXM-141GB"].map(str::to_owned).into()));
        for (list, error) in [
            ("", "invalid entry \"\" in the GPU list"),
            ("0xT4", "invalid entry \"0xT4\""),
            ("33xT4", "33 GPUs are too many"),
            ("99999999999999999999xT4", "invalid entry"),
            ("8xH100", "no GPU model \"H100\" in the catalogue; known models: T4, L4, "),
        ] {
            let found = keys(list).expect_err(list).to_string();
            assert!(found.starts_with(error), "{list}: {found}");
        }
    }
}
