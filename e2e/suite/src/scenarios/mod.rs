//! The scenarios, by what they are about.

mod admission;
mod compute;
mod degraded;
mod examples;
mod failures;
mod install;
mod modes;
mod mps;
mod shares;
mod sharing;
mod upgrade;

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
    modes::all_modes_run_on_one_node_at_once,
    modes::one_gpu_goes_through_every_mode,
    modes::slots_add_up_and_keep_every_other_mode_away,
    modes::one_claim_may_mix_modes_of_different_gpus,
    modes::a_list_of_choices_may_mix_modes,
    mps::two_users_are_clients_of_one_gpu_at_once,
    mps::pods_share_one_claims_gpu_by_mps,
    mps::clients_outlive_the_node_daemon,
    mps::a_deleted_keeper_comes_back_with_its_daemons,
    shares::two_shares_of_a_gpu_see_and_keep_their_own,
    shares::two_shares_of_an_instance_see_and_keep_their_own,
    compute::two_shares_of_a_gpu_get_their_parts_of_its_time,
    compute::a_changed_class_takes_effect_without_restarting_pods,
    compute::a_pod_of_high_priority_goes_first,
    shares::shares_run_beside_other_modes,
    shares::who_goes_round_the_library_is_ended,
    shares::claims_of_every_mode_come_and_go,
    admission::pods_of_the_device_plugin_run_unchanged,
    admission::each_profile_has_its_class,
    admission::what_prepare_would_refuse_is_not_accepted,
    admission::a_nodes_driver_writes_its_own_slices_only,
    admission::a_claims_status_tells_its_devices,
    admission::beside_a_device_plugin_our_gpus_wait,
    examples::every_example_runs,
    install::a_node_configuration_takes_effect_without_a_restart,
    failures::a_killed_driver_disturbs_no_pod_and_catches_up,
    failures::a_restarted_kubelet_finds_the_slices_again,
    failures::a_force_deleted_pod_gives_its_gpu_back,
    failures::a_reboot_with_a_lost_gpu_keeps_numbers_and_claims,
    failures::a_minute_without_the_api_server_costs_nothing,
    install::an_upgrade_disturbs_no_pod,
    upgrade::turning_shares_on_keeps_and_releases_what_runs,
    install::uninstall_is_refused_while_claims_live_and_leaves_nothing,
];

/// For a server that keeps neither counters nor capacity.
pub(crate) const GATES_OFF: &[Scenario] = scenarios![
    degraded::whole_gpus_are_all_there_is,
    degraded::instances_that_exist_are_used_as_they_are,
    degraded::what_is_missing_is_said,
    sharing::pods_share_a_whole_gpu_by_one_claim,
    sharing::two_gpus_are_neighbours_by_nvlink,
];

/// For an upgrade from a version before shares, which is installed.
pub(crate) const FROM: &[Scenario] =
    scenarios![upgrade::what_runs_since_before_shares_is_kept_counted_and_released];
