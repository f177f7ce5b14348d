use super::*;

const SHORT: Duration = Duration::from_millis(50);
const LONG: Duration = Duration::from_secs(20);

fn set(gpus: &[&str]) -> BTreeSet<GpuUuid> {
    gpus.iter().map(|gpu| GpuUuid::from(*gpu)).collect()
}

/// Two `Locks` over one directory behave like two processes, because `flock` belongs to the open
/// file and not to the process.
fn two_processes() -> (tempfile::TempDir, Locks, Locks) {
    let dir = tempfile::tempdir().unwrap();
    let (one, two) = (Locks::open(dir.path()).unwrap(), Locks::open(dir.path()).unwrap());
    (dir, one, two)
}

#[tokio::test]
async fn locked_gpu_is_busy_and_other_gpus_stay_free() {
    let (_dir, one, two) = two_processes();
    let held = one.lock(&set(&["GPU-0"]), LONG).await.unwrap();
    for other in [&one, &two] {
        let error = other.lock(&set(&["GPU-0", "GPU-7"]), SHORT).await.unwrap_err();
        assert!(matches!(error, LockError::Busy { gpu, .. } if gpu.as_str() == "GPU-0"));
        drop(other.lock(&set(&["GPU-7"]), LONG).await.unwrap());
    }
    drop(held);
    drop(two.lock(&set(&["GPU-0"]), LONG).await.unwrap());
}

#[tokio::test]
async fn waiting_process_gets_the_lock_when_it_is_released() {
    let (_dir, one, two) = two_processes();
    let held = one.lock(&set(&["GPU-0"]), LONG).await.unwrap();
    let gpus = set(&["GPU-0"]);
    let waiting = two.lock(&gpus, LONG);
    let release = async {
        tokio::task::yield_now().await;
        drop(held);
    };
    let (locked, ()) = tokio::join!(waiting, release);
    assert!(locked.unwrap().gpu(&"GPU-0".into()).is_some());
}

#[tokio::test]
async fn abandoned_wait_does_not_keep_the_lock() {
    let (_dir, one, two) = two_processes();
    let held = one.lock(&set(&["GPU-0"]), LONG).await.unwrap();
    assert!(two.lock(&set(&["GPU-0"]), SHORT).await.is_err());
    drop(held);
    // The waiting thread gets the lock and releases it at once.
    drop(one.lock(&set(&["GPU-0"]), LONG).await.unwrap());
}

#[tokio::test]
async fn bumped_generation_invalidates_the_index_of_others() {
    let (_dir, one, two) = two_processes();
    let gpus = set(&["GPU-0"]);
    let mut locked = one.lock(&gpus, LONG).await.unwrap();
    assert!(!locked.gpus()[0].is_indexed());
    locked.gpus_mut()[0].set_indexed();
    locked.gpus_mut()[0].bump_generation().unwrap();
    assert!(locked.gpus()[0].is_indexed(), "own changes keep the index valid");
    drop(locked);
    assert!(one.lock(&gpus, LONG).await.unwrap().gpus()[0].is_indexed());

    two.lock(&gpus, LONG).await.unwrap().gpus_mut()[0].bump_generation().unwrap();
    assert!(!one.lock(&gpus, LONG).await.unwrap().gpus()[0].is_indexed());
}

#[tokio::test]
async fn ownership_of_mig_mode_survives_a_restart() {
    let (dir, one, _) = two_processes();
    let gpus = set(&["GPU-0"]);
    one.lock(&gpus, LONG).await.unwrap().gpus_mut()[0].set_mig_ours(true).unwrap();
    let again = Locks::open(dir.path()).unwrap();
    assert!(again.lock(&gpus, LONG).await.unwrap().gpus()[0].mig_is_ours());
    let file = std::fs::read_to_string(dir.path().join("gpus/GPU-0")).unwrap();
    assert_eq!(file, "divvy 1 00000000000000000000 mig=ours\n");
}

#[tokio::test]
async fn damaged_lock_file_counts_as_mig_mode_off() {
    let (dir, one, _) = two_processes();
    for damage in ["", "divvy 1 0000", "divvy 2 00000000000000000007 mig=ours\n", "\u{0}\u{0}\u{0}"] {
        std::fs::write(dir.path().join("gpus/GPU-0"), damage).unwrap();
        let locked = one.lock(&set(&["GPU-0"]), LONG).await.unwrap();
        assert!(!locked.gpus()[0].mig_is_ours());
    }
}

#[tokio::test]
async fn uuid_with_path_separator_is_refused() {
    let (_dir, one, _) = two_processes();
    assert!(matches!(one.lock(&set(&["../GPU"]), LONG).await, Err(LockError::File(_))));
}
