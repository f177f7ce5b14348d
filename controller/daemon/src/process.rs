//! The standard process metrics of Prometheus clients, under their standard names. They are read
//! from `/proc/self` at every scrape.

use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};
use std::sync::atomic::AtomicU64;

type Seconds = Gauge<f64, AtomicU64>;

/// Memory, file descriptors, threads and CPU time of this process.
#[derive(Default)]
pub struct Process {
    resident: Gauge,
    virtual_memory: Gauge,
    fds: Gauge,
    threads: Gauge,
    cpu: Seconds,
    start: Seconds,
}

impl Process {
    /// Registers the metrics.
    pub fn register(&self, registry: &mut Registry) {
        let gauge = |metric: &Gauge| metric.clone();
        registry.register_with_unit(
            "process_resident_memory",
            "Resident memory",
            Unit::Bytes,
            gauge(&self.resident),
        );
        registry.register_with_unit(
            "process_virtual_memory",
            "Virtual memory",
            Unit::Bytes,
            gauge(&self.virtual_memory),
        );
        registry.register("process_open_fds", "Open file descriptors", gauge(&self.fds));
        registry.register("process_threads", "Threads", gauge(&self.threads));
        registry.register("process_cpu_seconds_total", "User and system CPU time", self.cpu.clone());
        registry.register_with_unit(
            "process_start_time",
            "Start time, since the epoch",
            Unit::Seconds,
            self.start.clone(),
        );
    }

    /// Reads the current values. A value that cannot be read keeps its previous state.
    pub fn update(&self) {
        let page = rustix::param::page_size() as i64;
        let ticks = rustix::param::clock_ticks_per_second() as f64;
        if let Ok(fds) = std::fs::read_dir("/proc/self/fd") {
            self.fds.set(fds.count() as i64);
        }
        let Ok(stat) = std::fs::read_to_string("/proc/self/stat") else { return };
        // The command name may contain any character, so fields are counted after its parenthesis.
        let Some((_, rest)) = stat.rsplit_once(") ") else { return };
        let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
        let field = |number: usize| fields.get(number - 3).and_then(|text| text.parse::<i64>().ok());
        if let (Some(user), Some(system)) = (field(14), field(15)) {
            self.cpu.set((user + system) as f64 / ticks);
        }
        if let (Some(threads), Some(size), Some(pages)) = (field(20), field(23), field(24)) {
            self.threads.set(threads);
            self.virtual_memory.set(size);
            self.resident.set(pages * page);
        }
        if let (Some(started), Some(boot)) = (field(22), boot_time()) {
            self.start.set(boot + started as f64 / ticks);
        }
    }
}

fn boot_time() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/stat").ok()?;
    stat.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scrape_shows_this_process() {
        let (process, mut registry) = (Process::default(), Registry::default());
        process.register(&mut registry);
        process.update();
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        for metric in ["process_resident_memory_bytes ", "process_start_time_seconds ", "process_open_fds "] {
            let line = text.lines().find(|line| line.starts_with(metric)).unwrap();
            assert!(!line.ends_with(" 0") && !line.ends_with(" 0.0"), "{line}");
        }
    }
}
