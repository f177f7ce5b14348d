//! Files of claims that no record explains, and old versions of the library for shares.
//!
//! They remain when a record was quarantined, or when a removal failed. A container may still use
//! them, so they are removed only after neither the kubelet nor a mount shows a use
//! ([`crate::claims::uses`]). Copies of the hook stay: running containers call them at their end.

use crate::claims::engine::{Engine, Inner};
use crate::claims::uses::{Owner, Use, Uses};
use crate::containers::Containers;
use crate::shares::Shares;
use divvy_api::{ClaimRef, ClaimUid};
use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;

/// The kind of a leftover.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    CdiFile,
    Metadata,
    Pages,
    Containers,
    Library,
}

/// A file or directory that no record explains.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Leftover {
    pub owner: Owner,
    pub kind: Kind,
    pub path: PathBuf,
}

/// Leftovers that are still used, as the owner and the sign of the use.
pub type KeptLeftovers = Vec<(Owner, Use)>;

impl Engine {
    /// All leftovers on this node.
    pub fn leftovers(&self) -> Vec<Leftover> {
        self.inner.leftovers()
    }

    /// Removes the leftovers without a use, and returns the owners of the others. One that cannot be
    /// removed is logged.
    pub async fn remove_leftovers(&self, leftovers: &[Leftover], uses: &Uses) -> KeptLeftovers {
        let (unused, kept) = divide(leftovers, uses);
        for leftover in unused {
            self.inner.remove_leftover(leftover).await;
        }
        kept
    }

    /// The claim that a leftover's metadata describes.
    pub fn described_claim(&self, claim: &ClaimUid) -> Option<ClaimRef> {
        self.inner.cdi.described_claim(claim)
    }
}

/// The leftovers without a use, and the owners of the others.
fn divide<'a>(leftovers: &'a [Leftover], uses: &Uses) -> (Vec<&'a Leftover>, KeptLeftovers) {
    let (mut unused, mut kept) = (Vec::new(), KeptLeftovers::new());
    for leftover in leftovers {
        match uses.of_owner(&leftover.owner) {
            None => unused.push(leftover),
            Some(_) if kept.iter().any(|(owner, _)| *owner == leftover.owner) => {}
            Some(sign) => kept.push((leftover.owner.clone(), sign)),
        }
    }
    (unused, kept)
}

impl Inner {
    /// A record is written before the files of its claim. So files that existed before the record
    /// was looked up in vain are leftovers.
    fn leftovers(&self) -> Vec<Leftover> {
        let shares = Shares::new(&self.options.paths);
        let of_claim = |kind| move |(claim, path)| Leftover { owner: Owner::Claim(claim), kind, path };
        let pages = shares.claims().into_iter().map(|claim| {
            let path = shares.root().join(claim.as_str());
            (claim, path)
        });
        let mut found: Vec<Leftover> =
            self.cdi.claim_files().into_iter().map(of_claim(Kind::CdiFile)).collect();
        found.extend(self.cdi.claim_metadata().into_iter().map(of_claim(Kind::Metadata)));
        found.extend(pages.map(of_claim(Kind::Pages)));
        let containers = Containers::new(&self.options.paths).claims();
        found.extend(containers.into_iter().map(of_claim(Kind::Containers)));
        let mut recorded = BTreeSet::new();
        found.retain(|leftover| match &leftover.owner {
            Owner::Claim(claim) if recorded.contains(claim) => false,
            Owner::Claim(claim) if self.has_no_record(claim) => true,
            Owner::Claim(claim) => {
                recorded.insert(claim.clone());
                false
            }
            Owner::Library(_) => true,
        });
        let library = |(hash, path)| Leftover { owner: Owner::Library(hash), kind: Kind::Library, path };
        found.extend(self.cdi.unused_libraries().into_iter().map(library));
        found
    }

    /// Whether the claim certainly has no record. A record that cannot be read now counts as one.
    fn has_no_record(&self, claim: &ClaimUid) -> bool {
        matches!(self.records.read(claim), Ok(None))
    }

    /// The claim's mutex keeps a prepare from writing the files again in between.
    async fn remove_leftover(&self, leftover: &Leftover) {
        let Leftover { owner, kind, path } = leftover;
        let _claim = match owner {
            Owner::Claim(claim) => {
                let mutex = self.claims.lock(claim).await;
                if !self.has_no_record(claim) {
                    return;
                }
                Some(mutex)
            }
            Owner::Library(_) => None,
        };
        let removed = match kind {
            Kind::CdiFile => std::fs::remove_file(path),
            Kind::Metadata | Kind::Pages | Kind::Containers | Kind::Library => std::fs::remove_dir_all(path),
        };
        match removed {
            Ok(()) => tracing::warn!(%owner, ?kind, path = %path.display(), "unused leftover removed"),
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => {}
            Err(cause) => tracing::warn!(
                %owner, ?kind, path = %path.display(), %cause,
                "unused leftover cannot be removed"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::claims::uses::{Listed, ListedClaim};
    use std::collections::BTreeMap;

    fn leftover(owner: Owner, kind: Kind) -> Leftover {
        Leftover { path: PathBuf::from(format!("/{owner}/{kind:?}")), owner, kind }
    }

    #[test]
    fn only_leftovers_without_a_use_are_removed() {
        let claim = |uid: &str| Owner::Claim(uid.into());
        let library = |hash: &str| Owner::Library(hash.to_owned());
        let leftovers = [
            leftover(claim("listed"), Kind::CdiFile),
            leftover(claim("listed"), Kind::Metadata),
            leftover(claim("mounted"), Kind::Pages),
            leftover(claim("unused"), Kind::CdiFile),
            leftover(claim("unused"), Kind::Metadata),
            leftover(library("a"), Kind::Library),
            leftover(library("b"), Kind::Library),
        ];
        let listed = ListedClaim {
            namespace: "ns".to_owned(),
            name: "c".to_owned(),
            cdi_ids: vec!["gpu.divvy.dev/claim=listed-gpu-0".to_owned()],
        };
        let uses = Uses {
            listed: Listed { claims: vec![listed], ..Listed::default() },
            mounted: BTreeMap::from([(claim("mounted"), 1), (library("a"), 2)]),
        };
        let (unused, kept) = divide(&leftovers, &uses);
        assert_eq!(unused, [&leftovers[3], &leftovers[4], &leftovers[6]]);
        let mounted = |pid| Use::Mounted { pid };
        let expected =
            [(claim("listed"), Use::Listed), (claim("mounted"), mounted(1)), (library("a"), mounted(2))];
        assert_eq!(kept, expected);
    }
}
