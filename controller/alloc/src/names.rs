//! Names of capacities, which can include the domain of their driver.

use crate::release::Release;

/// The name by which capacities are compared. The same capacity can be written with and without
/// the driver's domain, if the release accepts that.
pub(crate) fn canonical<'n>(release: Release, driver: &str, name: &'n str) -> &'n str {
    let bare = || name.strip_prefix(driver)?.strip_prefix('/');
    match release.qualifies_capacity_names() {
        true => bare().unwrap_or(name),
        false => name,
    }
}
