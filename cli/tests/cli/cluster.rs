//! Hosts of a test: each is a network namespace on a bridge. Their processes have identities and
//! authenticate datagrams.

use std::process::Command;

use serde_json::Value;

use crate::files::Folder;
use crate::namespaces::ip;
use crate::process::{Process, RACKSUM, Serving, run};
use crate::waits::await_that;

/// An aggregator's host with a bridge, and workers' hosts that are connected to the bridge.
/// Dropping the cluster removes them.
pub(crate) struct Cluster {
    name: String,
    workers: u16,
    pub(crate) folder: Folder,
}

impl Cluster {
    /// Creates the hosts; the error says why they cannot be created.
    fn make(name: &str, workers: u16) -> Result<Self, String> {
        let folder = Folder::new(&format!("chaos-{name}"));
        let name = format!("rc{}{name}", std::process::id());
        let cluster = Self { name, workers, folder };
        let hub = cluster.hub();
        ip(&["netns", "add", &hub])?;
        ip(&["-n", &hub, "link", "set", "lo", "up"])?;
        // The bridge has a MAC address of its own. If it had the address of a port, this host would
        // still accept packets for the port after the port is cut off.
        let own = ["address", "02:00:00:00:78:01"];
        let bridge = ["-n", &hub, "link", "add", "bridge"];
        ip(&[&bridge[..], &own, &["type", "bridge"]].concat())?;
        ip(&["-n", &hub, "addr", "add", "10.78.0.1/24", "dev", "bridge"])?;
        ip(&["-n", &hub, "link", "set", "bridge", "up"])?;
        for worker in 0..workers {
            let (host, port) = (cluster.worker(worker), port(worker));
            ip(&["netns", "add", &host])?;
            let pair = ["link", "add", &port, "netns", &hub, "type", "veth", "peer"];
            ip(&[&pair[..], &["name", "wire", "netns", &host]].concat())?;
            ip(&["-n", &hub, "link", "set", &port, "master", "bridge", "up"])?;
            ip(&["-n", &host, "link", "set", "lo", "up"])?;
            let addr = format!("10.78.0.{}/24", worker + 2);
            ip(&["-n", &host, "addr", "add", &addr, "dev", "wire"])?;
            ip(&["-n", &host, "link", "set", "wire", "up"])?;
        }
        cluster.issue();
        Ok(cluster)
    }

    fn hub(&self) -> String {
        format!("{}h", self.name)
    }

    pub(crate) fn worker(&self, worker: u16) -> String {
        format!("{}w{worker}", self.name)
    }

    /// Issues the identities of all hosts.
    fn issue(&self) {
        let authority = self.folder.path("authority.pem");
        run(&["identity", "init", "--out", &authority]).ok();
        for (name, role) in [("agg", "aggregator"), ("node", "worker")] {
            let out = self.folder.path(&format!("{name}.pem"));
            let issue = ["identity", "issue", name, "--role", role];
            run(&[&issue[..], &["--authority", &authority, "--out", &out]].concat()).ok();
        }
    }

    pub(crate) fn start(&self, host: &str, args: &[&str]) -> Process {
        Process::spawn(Command::new("ip").args(["netns", "exec", host, RACKSUM]).args(args))
    }

    /// Starts the aggregator on its host.
    pub(crate) fn serve(&self) -> Serving {
        self.serve_on("0")
    }

    /// Starts the aggregator on its host, on a given port.
    pub(crate) fn serve_on(&self, port: &str) -> Serving {
        self.serve_at(&self.hub(), "10.78.0.1", "status.sock", &["--port", port])
    }

    /// Starts an aggregator on a worker's host, with `parent` as its parent.
    pub(crate) fn serve_rack(&self, worker: u16, parent: &Serving) -> Serving {
        let (addr, status) = (format!("10.78.0.{}", worker + 2), format!("status{worker}.sock"));
        self.serve_at(
            &self.worker(worker),
            &addr,
            &status,
            &["--port", "0", "--parent", &parent.addr],
        )
    }

    fn serve_at(&self, host: &str, addr: &str, status: &str, flags: &[&str]) -> Serving {
        let (identity, status) = (self.folder.path("agg.pem"), self.folder.path(status));
        let args = ["aggregator", "--pool-mib", "64", "--bind", addr];
        let more = ["--identity", &identity, "--status-socket", &status];
        Serving::of(self.start(host, &[&args[..], &more, flags].concat()))
    }

    /// Returns the status of the aggregator on the hub, the host with the bridge.
    pub(crate) fn status(&self) -> Value {
        self.status_of("status.sock")
    }

    /// Returns the status of the aggregator on a worker's host.
    pub(crate) fn status_of_rack(&self, worker: u16) -> Value {
        self.status_of(&format!("status{worker}.sock"))
    }

    fn status_of(&self, socket: &str) -> Value {
        let status = self.folder.path(socket);
        serde_json::from_str(&run(&["status", &status, "--format", "json"]).ok().out).unwrap()
    }

    /// Starts a rank of a benchmark on each worker's host, and waits until all ranks run.
    pub(crate) fn ranks(&self, serving: &Serving, flags: &[&str]) -> Vec<Process> {
        self.ranks_at(&vec![serving; self.workers.into()], flags)
    }

    /// Like [`Self::ranks`], with the flags of each rank.
    pub(crate) fn ranks_with<'a>(
        &self,
        serving: &Serving,
        flags: impl Fn(u16) -> Vec<&'a str>,
    ) -> Vec<Process> {
        self.start_ranks(&vec![serving; self.workers.into()], flags)
    }

    /// Starts ranks of a benchmark: rank `i` on the host of worker `i`, at the aggregator `at[i]`.
    /// Waits until all ranks run.
    pub(crate) fn ranks_at(&self, at: &[&Serving], flags: &[&str]) -> Vec<Process> {
        self.start_ranks(at, |_| flags.to_vec())
    }

    fn start_ranks<'a>(
        &self,
        at: &[&Serving],
        flags: impl Fn(u16) -> Vec<&'a str>,
    ) -> Vec<Process> {
        let (identity, world) = (self.folder.path("node.pem"), at.len().to_string());
        let start = |(rank, serving): (u16, &&Serving)| {
            let number = rank.to_string();
            let args = ["bench", "--aggregator", &serving.addr, "--identity", &identity];
            let who = ["--rank", &number, "--world", &world];
            self.start(&self.worker(rank), &[&args[..], &who, &flags(rank)].concat())
        };
        let ranks: Vec<_> = (0..).zip(at).map(start).collect();
        await_that("the ranks run", || ranks.iter().all(|rank| rank.out().contains('#')));
        ranks
    }

    /// Cuts a worker off, or reconnects it. The bridge stops forwarding for the worker, and neither
    /// end of the link notices.
    pub(crate) fn cut_off(&self, worker: u16, cut: bool) {
        let master: &[&str] = if cut { &["nomaster"] } else { &["master", "bridge"] };
        ip(&[&["-n", &self.hub(), "link", "set", &port(worker)], master].concat()).unwrap();
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for host in (0..self.workers).map(|worker| self.worker(worker)).chain([self.hub()]) {
            // The host may not have been created.
            ip(&["netns", "del", &host]).unwrap_or(());
        }
    }
}

/// Returns the name of the bridge's port towards a worker.
fn port(worker: u16) -> String {
    format!("port{worker}")
}

/// Creates the cluster; if that fails, reports a skip and returns `None`.
pub(crate) fn cluster(name: &str, workers: u16) -> Option<Cluster> {
    match Cluster::make(name, workers) {
        Ok(cluster) => Some(cluster),
        Err(why) => {
            racksum_test_report::skip(&format!("network namespaces need root and iproute2: {why}"));
            None
        }
    }
}
