"""Which tests run when: a pytest plugin with ``--tier default`` and ``--tier full``.

The default tier is what CI runs for every change. It has all unit, engine and architecture tests, and of each
real part (ranks, hosts, sshd, Slurm, etcd, Prometheus, Chromium, MLflow, pods) those tests that show that the part works with the product. A new
real part or library adds one test of at most 20 s to it. All other tests, and those marked ``stress`` or ``alone``, run in the full tier only.
"""

import pytest

# Of these files only the tests named here run in the default tier: a function, or one of its cases.
# fmt: off
DEFAULT: dict[str, list[str]] = {
    "docs/fine-tuning.md": [],
    "docs/preference-tuning.md": [],
    "tests/ranks/test_equal_to_trl.py": [],
    "tests/ranks/test_borrowing.py": [
        "test_a_borrower_gives_back_and_its_losses_stay_the_same",
    ],
    "tests/engine/test_preloaded_libraries.py": ["test_the_trainer_is_not_preloaded_for_gpus"],
    "tests/hosts/test_away.py": ["test_several_that_are_away_are_told_apart_at_once"],
    "tests/hosts/test_bench_collectives.py": [],
    "tests/hosts/test_catalogue.py": [
        "test_named_and_mended[the second host's firewall drops the ports of ranks]",
        "test_named_and_mended[a clock that is a minute behind]",
        "test_named_and_mended[a GPU has fallen off the bus]",
        "test_the_table_has_every_fault",
    ],
    "tests/hosts/test_check.py": [
        "test_a_healthy_pair_passes_and_the_report_is_written",
        "test_a_direction_that_is_closed_is_named_and_mended_by_the_fix",
        "test_a_machine_that_joins_by_a_code_is_checked_like_any_other",
    ],
    "tests/hosts/test_elastic.py": [],
    "tests/hosts/test_full_disk.py": [],
    "tests/hosts/test_hang_command.py": [],
    "tests/hosts/test_join.py": [
        "test_the_pasted_line_is_all_that_a_machine_needs",
        "test_codes_that_are_wrong_or_used_open_nothing",
        "test_a_guest_ends_what_it_runs_when_the_host_is_killed",
    ],
    "tests/hosts/test_kills.py": [
        "test_a_kill_ends_the_run_everywhere_and_is_named[running-rank-1-node2]",
        "test_a_kill_ends_the_run_everywhere_and_is_named[running-node-agent-node1]",
    ],
    "tests/hosts/test_lab.py": [
        "test_hosts_have_names_addresses_and_processes_of_their_own",
        "test_ssh_runs_a_command_as_the_other_host",
        "test_labs_live_side_by_side_and_leave_nothing",
        "test_a_host_is_killed_without_a_word_and_boots_again",
    ],
    "tests/hosts/test_links.py": [
        "test_healthy_hosts_give_no_finding_and_all_figures[2]",
        "test_a_closed_meeting_port[drop]",
        "test_one_direction_is_blocked[refuse]",
        "test_a_cable_that_is_out",
        "test_big_frames_vanish",
        "test_nothing_listens_after_a_survey",
    ],
    "tests/hosts/test_machine_checks.py": [
        "test_no_false_alarms[None-root]",
        "test_nftables_alone",
    ],
    "tests/hosts/test_notebook.py": [],
    "tests/hosts/test_refusals.py": [
        "test_refused[a name that nobody knows]",
        "test_refused[our key is refused]",
        "test_refused[another script]",
        "test_refused[a firewall drops]",
        "test_refused[the given port is taken]",
    ],
    "tests/hosts/test_restarts.py": [
        "test_a_killed_rank_is_named_before_all_start_again",
    ],
    "tests/hosts/test_selftest_hosts.py": [],
    "tests/hosts/test_situations.py": [
        "test_a_run_works_in[a network that has IPv6 only]",
        "test_etcd_brings_the_hosts_together",
    ],
    "tests/hosts/test_spares.py": ["test_a_spare_takes_the_rank_of_a_host_that_dies"],
    "tests/hosts/test_trouble.py": [
        "test_the_page_for_people_in_trouble_has_every_story",
    ],
    "tests/pods/test_lab.py": [
        "test_variables_are_expanded_as_by_the_kubelet",
        "test_an_image_without_a_numeric_user_is_refused",
        "test_policies",
        "test_a_trainjob_is_merged_into_its_runtime",
        "test_pods_are_restricted_and_a_replaced_one_has_another_address",
    ],
    "tests/prometheus/test_abuse.py": [],
    "tests/prometheus/test_alert_faults.py": [
        "test_every_alert_is_raised_by_a_fault_somewhere",
    ],
    "tests/prometheus/test_exporter_killed.py": [],
    "tests/ranks/test_batch_finder.py": [],
    "tests/ranks/test_bench_probing.py": ["test_answers_come_by_rank"],
    "tests/ranks/test_bench_ranks.py": [
        "test_collectives_from_the_command_to_the_record",
    ],
    "tests/ranks/test_check_ranks.py": ["test_what_is_shown_ends_with_the_verdict_and_where_the_report_is"],
    "tests/ranks/test_collectives_probe.py": [
        "test_one_wrong_value_in_a_million_is_found_with_its_rank[corrupt-sum]",
    ],
    "tests/ranks/test_full_disk_run.py": [],
    "tests/ranks/test_hang_command.py": ["test_a_stopped_rank_is_named"],
    "tests/ranks/test_jit_checkpoint.py": [],
    "tests/ranks/test_kill_matrix.py": [
        "test_every_victim_is_struck_at_every_moment_in_every_layout",
        "test_the_smallest_difference_is_one",
        "test_the_tables_count_kills_and_runs",
    ],
    "tests/ranks/test_lab_command.py": [],
    "tests/ranks/test_lora_runs.py": [
        "test_two_ranks_train_next_to_shards_in_4_bits_and_peft_loads_the_adapter",
    ],
    "tests/ranks/test_labs.py": [
        "test_starter_solution_and_every_planted_mistake[communication]",
        "test_every_word_is_planted_and_names_belong_to_one_lab",
    ],
    "tests/ranks/test_muster_train.py": [
        "test_under_torchrun",
        "test_what_needs_no_ranks_is_told_before_they_start",
    ],
    "tests/ranks/test_notebook.py": [
        "test_cells_run_on_ranks_and_what_is_alike_is_shown_once",
        "test_nothing_is_left_of_a_kernel_that_is_killed[True]",
    ],
    "tests/ranks/test_notebook_page.py": [],
    "tests/ranks/test_other_launchers.py": [
        "test_ranks_start_as_they_do_under_torchrun[flags]",
        "test_the_variables_are_those_of_accelerate[fsdp]",
    ],
    "tests/ranks/test_plan_memory.py": [
        "test_a_case_is_found_by_its_name",
        "test_what_is_traced_with_lora_is_what_real_ranks_take[QLoRA, one process]",
    ],
    "tests/ranks/test_plan_rates.py": [],
    "tests/ranks/test_preemption.py": ["test_a_warning_makes_all_ranks_save_and_end_with_the_code_for_going_on"],
    "tests/ranks/test_process_group_ranks.py": [
        "test_under_torchrun_unchanged",
        "test_spawned_ranks_meet_on_loopback_without_a_launcher",
    ],
    "tests/ranks/test_queue_command.py": [
        "test_a_job_that_a_reboot_ended_is_restored_and_keeps_its_waiting_time[term-children]",
        "test_what_cannot_be_queued_is_refused_before_there_is_a_run",
    ],
    "tests/ranks/test_prove.py": [
        "test_the_users_files_stay_as_they_are",
        "test_a_write_outside_the_folder_is_refused",
        "test_a_fault_is_the_first_difference[plain-no-set-epoch]",
    ],
    "tests/ranks/test_selftest.py": ["test_from_the_command_to_the_result_file"],
    "tests/ranks/test_profile.py": [
        "test_every_phase_of_a_step_is_seen_without_a_change_of_the_script",
        "test_what_it_was_that_trained_is_written_down",
    ],
    "tests/ranks/test_heartbeat.py": ["test_what_ranks_do_is_known_and_kept"],
    "tests/ranks/test_proven_exports.py": [
        "test_final_and_exports_are_the_trained_model[llama]",
        "test_final_and_exports_are_the_trained_model[vit]",
    ],
    "tests/ranks/test_quiet_output.py": ["test_every_line_is_ours[train-ddp]"],
    "tests/ranks/test_recorded_scripts.py": [
        "test_a_plain_script",
        "test_transformers",
        "test_lightning",
        "test_accelerate",
    ],
    "tests/ranks/test_resumed_scripts.py": ["test_a_restart_resumes_as_told"],
    "tests/ranks/test_run_devices.py": [
        "test_gpus_are_the_run_s_alone_until_it_ends[2]",
        "test_more_ranks_than_gpus_is_one_sentence_and_no_process",
    ],
    "tests/ranks/test_run_ends.py": [
        "test_a_signal_lets_the_ranks_save_and_ends_everything[terminate]",
        "test_a_second_interrupt_ends_them_at_once",
        "test_a_killed_launcher_leaves_nothing_within_10_s[running]",
        "test_stop_ends_a_run_and_says_so",
        "test_a_run_that_outlives_its_shell",
    ],
    "tests/ranks/test_run_failures.py": [
        "test_the_first_rank_s_traceback_is_told_although_both_raise",
        "test_a_kill_from_outside_is_explained",
        "test_restarts_begin_anew_and_say_so",
        "test_ranks_that_are_saving_get_the_whole_grace",
    ],
    "tests/ranks/test_run_report.py": ["test_the_numbers_of_a_report_are_those_of_the_run"],
    "tests/ranks/test_run_without_torchrun.py": ["test_two_ranks_meet_without_an_agent"],
    "tests/ranks/test_sinks.py": [
        "test_a_real_mlflow_server_takes_a_run_that_is_exported",
        "test_passwords_are_refused",
    ],
    "tests/ranks/test_smoke.py": [
        "test_under_torchrun_every_rank_says_its_three_lines[2]",
        "test_alone_it_is_a_group_of_one",
    ],
    "tests/ranks/test_stop.py": [
        "test_every_rank_gets_one_signal_and_time_to_save[sigterm]",
        "test_ranks_that_had_to_be_killed_are_named",
    ],
    "tests/ranks/test_train_planned.py": [],
    "tests/ranks/test_train_restarts.py": ["test_a_run_survives_the_death_of_a_rank_and_of_its_launcher"],
    "tests/slurm/test_arrays.py": ["test_a_task_that_is_requeued_leaves_the_others_alone"],
    "tests/slurm/test_containers.py": ["test_several_nodes_without_srun_are_refused"],
    "tests/slurm/test_heterogeneous.py": [],
    "tests/slurm/test_jobs.py": [
        "test_a_job_is_followed_from_the_queue_to_its_end",
        "test_a_failure_has_its_exit_code",
        "test_cancelling_ends_the_program_politely",
        "test_the_warning_reaches_the_program_itself",
        "test_a_requeued_job_goes_on_in_the_same_log",
    ],
    "tests/slurm/test_muster_check.py": [],
    "tests/slurm/test_muster_run.py": [
        "test_a_job_on_three_nodes_is_submitted_and_followed",
        "test_a_failing_rank_fails_the_job_with_its_cause",
    ],
    "tests/slurm/test_preemption.py": [],
    "tests/slurm/test_spares.py": [],
    "tests/slurm/test_srun.py": [
        "test_agents_come_in_the_order_of_the_nodes",
        "test_long_and_foreign_messages_arrive_whole_both_ways",
        "test_an_agent_that_is_killed_is_named_and_the_others_go_on",
    ],
}
# Of these files the tests named here run in the full tier only.
FULL: dict[str, list[str]] = {
    "tests/architecture/test_leak_guard.py": ["test_a_skip_is_a_failure_where_skips_are_forbidden"],
    "tests/architecture/test_side_by_side.py": ["test_tests_run_side_by_side_or_alone[those that are alone have none]"],
    "tests/engine/plan/test_building.py": ["test_a_copy_is_traced_like_a_model_that_was_just_built[4]"],
    "tests/engine/plan/test_depth.py": [
        "test_peaks_and_logs_are_those_of_the_whole_model[many samples]",
        "test_peaks_and_logs_are_those_of_the_whole_model[more shards than rows]",
    ],
    "tests/engine/train/test_compiling.py": ["test_blocks_share_what_is_compiled_and_give_the_same_gradients"],
    "tests/hosts/test_hang_evidence.py": ["test_a_stopped_rank_on_another_machine_is_named_and_both_show_what_they_do"],
    "tests/ranks/test_bench_products.py": ["test_the_products_of_a_model_end_in_a_page_and_a_record"],
    "tests/ranks/test_example.py": ["test_it_learns_on_two_ranks_and_goes_on_from_its_checkpoint"],
    "tests/ranks/test_hangs.py": [
        "test_ranks_that_called_different_collectives_are_named_with_both_places",
        "test_deaths_are_explained_from_a_copy_of_the_folder",
    ],
    "tests/ranks/test_muster_train_settings.py": [
        "test_the_loss_falls_and_is_the_same_for_ddp_and_fsdp",
        "test_how_a_step_is_cut_changes_nothing",
    ],
    "tests/ranks/test_new_user.py": ["test_every_command_of_a_document_works_from_an_empty_folder"],
    "tests/ranks/test_notebook_example.py": ["test_all_gather_by_a_store_and_by_ranks"],
    "tests/ranks/test_trained_models.py": [
        "test_the_command_checks_what_it_exports_and_merges",
        "test_final_is_the_trained_model",
        "test_a_damaged_adapter_is_not_exported",
        "test_tokenizer_and_generation_files_come_along[full-ddp]",
    ],
    "tests/ranks/test_warm_agent.py": ["test_a_forked_rank_sees_what_a_new_one_sees"],
    "tests/ranks/train/test_device_step.py": [
        "test_the_host_reads_nothing_between_two_lines[single-1]",
        "test_the_host_reads_nothing_between_two_lines[hybrid-4]",
        "test_a_step_that_is_not_finite_changes_nothing_at_all[hybrid-4-adamw-0]",
        "test_a_step_that_is_not_finite_changes_nothing_at_all[hybrid-4-adamw-3]",
        "test_a_step_that_is_not_finite_changes_nothing_at_all[hybrid-4-sgd-0]",
        "test_a_step_that_is_not_finite_changes_nothing_at_all[hybrid-4-sgd-3]",
    ],
    "tests/ranks/train/test_examples.py": [
        "test_the_language_model_learns_the_same_alone_sharded_and_with_trainer",
        "test_lora_trains_adapters_alone_and_the_loss_falls",
        "test_the_image_classifier_learns_the_same_with_a_loop_and_with_trainer",
        "test_ppo_raises_its_reward_on_two_ranks_from_a_settings_file",
        "test_lora_leaves_the_weights_of_the_model_as_they_are",
    ],
    "tests/ranks/train/test_fsdp_memory.py": ["test_what_one_rank_has_no_room_for_is_trained_by_four"],
    "tests/ranks/train/test_optimizers.py": [
        "test_a_resumed_training_is_the_one_that_never_stopped[adamw_8bit-ddp]",
        "test_a_resumed_training_is_the_one_that_never_stopped[muon-fsdp]",
        "test_a_run_of_version_0_1_with_one_group_resumes_exactly[fsdp]",
        "test_early_stopping_after_epochs",
    ],
    "tests/ranks/train/test_out_of_memory.py": ["test_all_ranks_end_under_torchrun_too"],
    "tests/ranks/train/test_parity.py": [
        "test_gradients_losses_and_weights_are_those_of_one_plain_process[1]",
        "test_gradients_losses_and_weights_are_those_of_one_plain_process[4]",
    ],
    "tests/ranks/train/test_resume.py": ["test_nothing_shows_that_a_training_was_interrupted[4]"],
    "tests/ranks/train/test_saving.py": ["test_a_service_that_is_lost_fails_a_save_and_nothing_else"],
    "tests/unit/bench/test_comparison.py": ["test_too_few_pairs_tell_only_what_is_beyond_the_floor"],
    "tests/unit/cli/test_hostile_runs.py": [
        "test_a_hostile_run_itself_is_explained_and_watched",
        *(f"test_no_text_of_a_run_controls_the_terminal[{words}]" for words in (
            "explain last --json", "watch last --lines", "top last --once", "checkpoint ls 2", "stop no such run",
        )),
    ],
    "tests/unit/monitor/sinks/test_trackers.py": [
        "test_a_run_of_mlflow_is_found_again_without_its_id",
        "test_a_tracker_that_is_not_there_is_told_and_asked_again",
    ],
}
# fmt: on
FULL_ONLY = ("stress", "alone")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=["default", "full"], default="full")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--tier") == "full":
        return
    if config.args_source.name != "ARGS":
        _refuse_unknown(items)
    left_out = [item for item in items if not _is_default(item)]
    items[:] = [item for item in items if _is_default(item)]
    config.hook.pytest_deselected(items=left_out)


def _refuse_unknown(items: list[pytest.Item]) -> None:
    """Refuse names in the tables that no test has any more."""
    known = {(_file(item), name) for item in items for name in _names(item)}
    wanted = {(file, name) for table in (DEFAULT, FULL) for file in table for name in table[file]}
    if unknown := [f"{file}: {name}" for file, name in sorted(wanted - known)]:
        raise pytest.UsageError(
            "tests/tiers.py names tests that do not exist: " + "; ".join(unknown)
        )


def _is_default(item: pytest.Item) -> bool:
    if any(item.get_closest_marker(name) for name in FULL_ONLY):
        return False
    file = _file(item)
    if not _names(item).isdisjoint(FULL.get(file, ())):
        return False
    return file not in DEFAULT or not _names(item).isdisjoint(DEFAULT[file])


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def _names(item: pytest.Item) -> set[str]:
    """Return the test's function and its case."""
    return {item.name, getattr(item, "originalname", item.name)}
