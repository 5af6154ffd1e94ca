//! `racksum inventory`: files that `racksum place` reads.

use serde_json::Value;

use crate::files::Folder;
use crate::process::{Ended, run};

const TOPOLOGY: &str = "SwitchName=s1 Nodes=n[1-2]\nSwitchName=s2 Nodes=n3\n\
                        SwitchName=top Switches=s[1-2]\n";
const GRAPH: &str = r#"{"instances": [
    {"id": "i-1", "network_layers": ["leaf-a", "spine"], "labels": {"name": "n1"}},
    {"id": "i-2", "network_layers": ["leaf-b", "spine"], "labels": {"name": "n2"}}]}"#;
const NODES: &str = r#"{"items": [
    {"metadata": {"name": "n1", "labels": {"zone": "a", "rack": "r1"}},
     "status": {"allocatable": {"cpu": "8", "nvidia.com/gpu": "4"}}},
    {"metadata": {"name": "n2", "labels": {"zone": "a", "rack": "r2"}},
     "spec": {"taints": [{"key": "spot", "effect": "NoSchedule"}]},
     "status": {"allocatable": {"cpu": "8", "nvidia.com/gpu": "4"}}}]}"#;
const RATE: [&str; 2] = ["--nic-mbit", "25000"];

fn print(folder: &Folder, kind: &str, name: &str, text: &str, flags: &[&str]) -> Ended {
    let file = folder.path(name);
    std::fs::write(&file, text).unwrap();
    run(&[&["inventory", kind, &file], flags].concat())
}

/// Plans a job of two ranks with printed nodes, and returns the plan in JSON.
fn plan(folder: &Folder, nodes: &str, text: &str, job: &str) -> Value {
    let (nodes, job_file) = (folder.path(nodes), folder.path("job.toml"));
    std::fs::write(&nodes, text).unwrap();
    std::fs::write(&job_file, format!("name = 'x'\nranks = 2\nbytes = 1_000_000\n{job}")).unwrap();
    let planned = run(&["place", "--job", &job_file, "--nodes", &nodes, "--format", "json"]).ok();
    serde_json::from_str(&planned.out).unwrap()
}

#[test]
fn a_topology_of_slurm_is_planned_on() {
    let folder = Folder::new("inventory-slurm");
    let flags = ["--cpus-per-node", "16", "--gpus-per-node", "h100:1"];
    let flags = [&RATE[..], &flags].concat();
    let toml = print(&folder, "slurm", "topology.conf", TOPOLOGY, &flags).ok().out;
    let file = folder.path("topology.conf");
    let head = format!(
        "# 3 hosts of {file}, with levels widest first.\n# nic_mbit is what --nic-mbit or a label \
         said, not a measurement, and used resources are not known.\nlevels = [\"level1\", \
         \"level0\"]\n"
    );
    assert!(toml.starts_with(&head), "{toml}");
    assert!(toml.contains("nic_mbit = 25000.0\ncpus = 16\n"), "{toml}");
    let planned = plan(&folder, "nodes.toml", &toml, "gpus_per_rank = 1\ngpu_type = 'h100'");
    assert_eq!(planned["domain"], "top/s1");
    // A resource that is not known is left out.
    let bare = print(&folder, "slurm", "topology.conf", TOPOLOGY, &RATE).ok().out;
    assert!(!bare.contains("cpus") && !bare.contains("gpus") && !bare.contains("taints"), "{bare}");
    let json = [&flags[..], &["--format", "json", "--hosts", "n[3,1]"]].concat();
    let json = print(&folder, "slurm", "topology.conf", TOPOLOGY, &json).ok().out;
    let planned = plan(&folder, "nodes.json", &json, "gpus_per_rank = 1");
    assert_eq!(planned["domain"], "top");
}

#[test]
fn a_flat_topology_needs_the_names_of_hosts() {
    let folder = Folder::new("inventory-flat");
    let flat = "- topology: x\n  flat: true\n";
    let ended = print(&folder, "slurm", "topology.yaml", flat, &RATE);
    let file = folder.path("topology.yaml");
    let why = format!("{file}: a flat topology lists no hosts; name them with --hosts");
    assert_eq!(ended.failed(2), why);
    let flags = [&RATE[..], &["--hosts", "n[1-2]"]].concat();
    let toml = print(&folder, "slurm", "topology.yaml", flat, &flags).ok().out;
    assert!(toml.contains("levels = []\n") && toml.contains("name = \"n2\""), "{toml}");
}

#[test]
fn topograph_is_read_from_the_closest_layer() {
    let folder = Folder::new("inventory-topograph");
    let flags = [&RATE[..], &["--name-label", "name", "--cpus-per-node", "1"]].concat();
    let toml = print(&folder, "topograph", "graph.json", GRAPH, &flags).ok().out;
    let planned = plan(&folder, "nodes.toml", &toml, "cpus_per_rank = 1");
    assert_eq!(planned["domain"], "spine");
    assert_eq!(planned["hosts"][0]["domain"], "spine/leaf-a");
    assert_eq!(planned["hosts"][1]["host"], "n2");
}

#[test]
fn nodes_of_kubernetes_are_read() {
    let folder = Folder::new("inventory-kubernetes");
    let flags = [&RATE[..], &["--levels", "zone,rack"]].concat();
    let toml = print(&folder, "kubernetes", "nodes.json", NODES, &flags).ok().out;
    let planned = plan(&folder, "nodes.toml", &toml, "gpus_per_rank = 2");
    assert_eq!(planned["domain"], "a/r1");
    // The second node has a taint.
    let planned = plan(&folder, "nodes.toml", &toml, "gpus_per_rank = 4\ntolerates = ['spot']");
    assert_eq!(planned["domain"], "a");
    let flags = [&RATE[..], &["--levels", "rack,zone"]].concat();
    let ended = print(&folder, "kubernetes", "nodes.json", NODES, &flags);
    let why = "level \"rack\" is listed before \"zone\", but \"zone\" is wider: \"a\" contains \
               several values of \"rack\"; list the widest level first, or leave the second out";
    assert_eq!(ended.failed(2), format!("{}: {why}", folder.path("nodes.json")));
}

#[test]
fn every_host_needs_a_rate_from_a_label_or_a_flag() {
    let folder = Folder::new("inventory-rates");
    let flags = ["--levels", "zone,rack"];
    let label = |text: &str, rack: &str, mbit: u32| {
        let from = format!(r#""rack": "{rack}""#);
        text.replace(&from, &format!(r#"{from}, "racksum.dev/nic-mbit": "{mbit}""#))
    };
    let first = label(NODES, "r1", 100);
    let all = print(&folder, "kubernetes", "nodes.json", &label(&first, "r2", 200), &flags);
    let all = all.ok().out;
    assert!(all.contains("nic_mbit = 100.0") && all.contains("nic_mbit = 200.0"), "{all}");
    for (kind, name, text, host, flags) in [
        ("kubernetes", "nodes.json", first.as_str(), "n2", &flags[..]),
        ("slurm", "topology.conf", TOPOLOGY, "n1", &[]),
    ] {
        let why = format!(
            "host \"{host}\": the rate of its network interface is not given; give one for all \
             hosts with --nic-mbit"
        );
        assert_eq!(print(&folder, kind, name, text, flags).failed(2), why);
    }
}

#[test]
fn decisions_of_a_reader_are_warnings() {
    let folder = Folder::new("inventory-notes");
    let text = format!("{TOPOLOGY}SwitchName=island Nodes=n4\n");
    let ended = print(&folder, "slurm", "topology.conf", &text, &RATE).ok();
    let warnings: Vec<_> = ended.err.lines().collect();
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    let file = folder.path("topology.conf");
    let island = format!("racksum: warning: {file}: line 4: switch \"island\" is next to a level");
    assert!(warnings[0].starts_with(&island), "{warnings:?}");
}

#[test]
fn a_file_that_is_wrong_is_named_with_its_line() {
    let folder = Folder::new("inventory-wrong");
    for (kind, name, text, expected) in [
        ("slurm", "topology.conf", "SwitchName=a Nodes=n[1-", "line 1: \"n[1-\" has brackets"),
        ("slurm", "topology.yaml", "- topology: a\n  tree: 1\n", "line 2: "),
        ("topograph", "graph.json", "{\n\"instances\": 1}", "line 2: invalid type: integer"),
        ("kubernetes", "nodes.json", "{\"items\": [}", "line 1: expected value"),
    ] {
        let levels = if kind == "kubernetes" { &["--levels", "zone"][..] } else { &[] };
        let ended = print(&folder, kind, name, text, &[&RATE[..], levels].concat());
        let why = ended.failed(2);
        assert!(why.starts_with(&format!("{}: {expected}", folder.path(name))), "{why}");
    }
    let rates = [&RATE[..], &["--nic-mbit", "m[1-2]=100"]].concat();
    let ended = print(&folder, "slurm", "topology.conf", TOPOLOGY, &rates);
    assert!(ended.failed(2).contains("the file does not list host \"m1\", for whose"), "{ended:?}");
    let missing = run(&["inventory", "slurm", "/nowhere", "--nic-mbit", "1"]);
    assert!(missing.failed(2).starts_with("cannot read /nowhere: No such file"), "{missing:?}");
}
