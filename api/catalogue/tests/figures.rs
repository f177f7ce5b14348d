//! The catalogue's figures agree with each other and with the rules of go-nvlib and the driver.

use divvy_catalogue as catalogue;
use divvy_catalogue::{GiProfile, GpuModel, MigModel};
use std::collections::BTreeSet;

fn mig_models() -> impl Iterator<Item = (&'static GpuModel, &'static MigModel)> {
    catalogue::all().filter_map(|model| Some((model.row(), model.row().mig.as_ref()?)))
}

/// The memory in a profile's name as go-nvlib computes it: eighths of the GPU, rounded up.
fn gigabytes(total_mib: u64, mib: u64) -> u64 {
    let eighths = (mib * 8).div_ceil(total_mib);
    let total_gib = total_mib.div_ceil(1024);
    (eighths * total_gib * 2 + 8) / 16
}

/// Suffix of a profile name after the memory, by profile index.
fn suffix(index: u32) -> &'static str {
    match index {
        7 | 8 => "+me",
        0xA | 0xB | 0xC | 0x11 => "+gfx",
        0xD | 0xE => "-me",
        0xF | 0x10 => "+me.all",
        _ => "",
    }
}

#[test]
fn every_model_has_a_unique_key_and_a_source() {
    let keys: Vec<&str> = catalogue::keys().collect();
    for (model, key) in catalogue::all().zip(&keys) {
        assert_eq!(model.row().key, *key);
        assert_eq!(catalogue::find(key), Ok(model));
        assert!(!model.row().source.is_empty(), "{key}");
        assert!(!model.row().time_slicing.source.is_empty(), "{key}");
        assert!(model.row().memory_reserved_mib < model.row().memory_total_mib, "{key}");
    }
    assert_eq!(keys.iter().collect::<BTreeSet<_>>().len(), keys.len());
    for (model, mig) in mig_models() {
        assert!(mig.profiles.iter().all(|profile| !profile.source.is_empty()), "{}", model.key);
    }
}

#[test]
fn profile_names_match_go_nvlib() {
    for (model, mig) in mig_models() {
        for profile in &mig.profiles {
            let memory = gigabytes(model.memory_total_mib, profile.memory_mib);
            let name = format!("{}g.{memory}gb{}", profile.slices(), suffix(profile.index));
            assert_eq!(profile.name, name, "{}", model.key);
        }
    }
}

#[test]
fn placements_lie_in_the_grid() {
    for (model, mig) in mig_models() {
        for profile in &mig.profiles {
            assert_eq!(mig.grid % profile.size, 0, "{} {}", model.key, profile.name);
            assert!(profile.starts.is_sorted(), "{} {}", model.key, profile.name);
            for place in profile.placements() {
                assert!(place.slices().end <= mig.grid, "{} {} {place}", model.key, profile.name);
                assert_eq!(place.start % place.size, 0, "{} {} {place}", model.key, profile.name);
            }
        }
    }
}

#[test]
fn promised_instances_fit_into_the_gpu() {
    for (model, mig) in mig_models() {
        let whole = mig.whole().expect("a profile for the whole GPU");
        assert_eq!(whole.instances, 1, "{}", model.key);
        for profile in &mig.profiles {
            let name = format!("{} {}", model.key, profile.name);
            let all = |figure: u32| figure * profile.instances;
            assert!(profile.instances as usize <= profile.starts.len(), "{name}");
            assert!(all(profile.slices()) <= mig.compute_slices, "{name}");
            assert!(all(profile.sm) <= whole.sm && whole.sm <= model.multiprocessors, "{name}");
            assert!(u64::from(profile.instances) * profile.memory_mib <= model.memory_total_mib, "{name}");
            for (engines, total) in profile.engines().into_iter().zip(whole.engines()) {
                assert!(all(engines) <= total, "{name}: {engines} of {total}");
            }
        }
        let unique = |of: &dyn Fn(&GiProfile) -> u32| {
            mig.profiles.iter().map(of).collect::<BTreeSet<_>>().len() == mig.profiles.len()
        };
        assert!(unique(&|profile| profile.id) && unique(&|profile| profile.index), "{}", model.key);
    }
}

#[test]
fn full_compute_instance_has_all_multiprocessors() {
    for (model, mig) in mig_models() {
        for profile in &mig.profiles {
            let offered: Vec<_> = model.ci_profiles(profile).collect();
            let full = offered.iter().filter(|ci| ci.slices == profile.slices() && ci.index < 7);
            assert_eq!(full.map(|ci| ci.sm).collect::<Vec<_>>(), [profile.sm], "{}", profile.name);
            for ci in offered {
                assert!(ci.sm * ci.instances <= profile.sm, "{} {} {ci:?}", model.key, profile.name);
            }
        }
    }
}

/// Compute-instance sizes in GPU instances of 7, 4, 3, 2 and 1 slices.
#[test]
fn compute_instance_sizes_match_the_driver() {
    let h100 = catalogue::find("H100-SXM5-80GB").expect("in the catalogue").row();
    let check = |profile: u32, expected: &[(u32, u32)]| {
        let profile = h100.profile(profile).expect("a profile");
        let plain = h100.ci_profiles(profile).filter(|ci| ci.index != 7);
        assert_eq!(plain.map(|ci| (ci.slices, ci.instances)).collect::<Vec<_>>(), expected);
    };
    check(0, &[(1, 7), (2, 3), (3, 2), (4, 1), (7, 1)]);
    check(5, &[(1, 4), (2, 2), (4, 1)]);
    check(9, &[(1, 3), (2, 1), (3, 1)]);
    check(14, &[(1, 2), (2, 1)]);
    check(19, &[(1, 1)]);
}
