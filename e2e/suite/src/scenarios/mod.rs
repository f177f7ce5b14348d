//! The scenarios, by what they are about.

mod failures;
mod sharing;

use crate::world::World;
use anyhow::Result;
use futures::future::LocalBoxFuture;

/// A promise, in the words of its name.
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    pub(crate) run: for<'a> fn(&'a World) -> LocalBoxFuture<'a, Result<()>>,
}

macro_rules! scenarios {
    ($($module:ident::$name:ident),* $(,)?) => {
        &[$(Scenario { name: stringify!($name), run: |world| Box::pin($module::$name(world)) }),*]
    };
}

pub(crate) const ALL: &[Scenario] = scenarios![
    sharing::a_template_gives_each_pod_its_own_mig_instance,
    sharing::pods_share_a_whole_gpu_by_one_claim,
    sharing::memory_selects_the_gpu,
    sharing::two_gpus_are_neighbours_by_nvlink,
    sharing::the_first_available_choice_is_taken,
    sharing::seven_slices_are_seven_pods_and_the_eighth_waits,
    sharing::a_gpu_goes_from_mig_to_whole_and_back,
    sharing::admin_access_looks_on_and_takes_nothing,
    failures::a_killed_driver_disturbs_no_pod_and_catches_up,
    failures::a_restarted_kubelet_finds_the_slices_again,
    failures::a_force_deleted_pod_gives_its_gpu_back,
    failures::a_reboot_with_a_lost_gpu_keeps_numbers_and_claims,
    failures::a_minute_without_the_api_server_costs_nothing,
];
