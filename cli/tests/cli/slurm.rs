//! `racksum place --slurm` in the environment of an allocation that Slurm would give.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use serde_json::Value;

use crate::files::Folder;
use crate::ports::own_port;
use crate::process::{Ended, Process, RACKSUM};

/// Two leaf switches of two hosts each.
const TOPOLOGY: &str = "\
SwitchName=leaf1 Nodes=n[1-2]
SwitchName=leaf2 Nodes=n[3-4]
SwitchName=spine Switches=leaf[1-2]
";
const JOB: &str = "name = 'vision'\nranks = 4\ngpus_per_rank = 1\nbytes = 100_000_000\n";

/// An allocation: a folder with Slurm's configuration, and variables.
struct Allocation {
    folder: Folder,
    variables: BTreeMap<&'static str, String>,
}

impl Allocation {
    /// Returns an allocation of three hosts with a GPU and eight cores for each of two tasks.
    fn new(test: &str) -> Self {
        let folder = Folder::new(&format!("slurm-{test}"));
        let conf = folder.path("slurm.conf");
        let this = Self {
            folder,
            variables: [
                ("SLURM_CONF", conf.as_str()),
                ("SLURM_JOB_NODELIST", "n[1,3-4]"),
                ("SLURM_JOB_CPUS_PER_NODE", "16(x3)"),
                ("SLURM_CPUS_PER_TASK", "8"),
                ("SLURM_GPUS_PER_NODE", "h100:2"),
                ("SLURM_NTASKS", "4"),
            ]
            .map(|(name, value)| (name, value.to_owned()))
            .into(),
        };
        this.write("job.toml", JOB);
        this.write("topology.conf", TOPOLOGY);
        this
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.folder.path(name), text).unwrap();
    }

    fn without(mut self, variable: &str) -> Self {
        self.variables.remove(variable).unwrap();
        self
    }

    fn with(mut self, variable: &'static str, value: &str) -> Self {
        self.variables.insert(variable, value.into());
        self
    }

    fn place(&self, flags: &[&str]) -> Ended {
        let mut command = Command::new(RACKSUM);
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("SLURM_")) {
            command.env_remove(name);
        }
        command.env_remove("RACKSUM_IDENTITY").envs(&self.variables);
        command.args(["place", "--job", &self.folder.path("job.toml"), "--slurm"]).args(flags);
        Process::spawn(&mut command).end(60)
    }

    /// Writes a program in the place of `srun`.
    fn write_srun(&self, text: &str) {
        self.write("srun", text);
        let executable = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(self.folder.path("srun"), executable).unwrap();
    }

    /// Runs a script with that program on its path.
    fn shell(&self, script: &str) -> Ended {
        let mut shell = Command::new("sh");
        shell.args(["-c", script]).env("PATH", format!("{}:/usr/bin:/bin", self.folder.path("")));
        shell.env("TMPDIR", self.folder.path("")).envs(&self.variables);
        shell.env_remove("SLURM_HOSTFILE").env_remove("RACKSUM_AGGREGATOR");
        Process::spawn(&mut shell).end(60)
    }

    fn fails(&self, flags: &[&str]) -> String {
        self.place(flags).failed(2).to_owned()
    }
}

const RATE: [&str; 2] = ["--nic-mbit", "25000"];

#[test]
fn the_hosts_of_an_allocation_get_aggregators_and_ranks() {
    let slurm = Allocation::new("plan");
    let flags = [&RATE[..], &["--", "--identity", "/etc/racksum/{host}.pem"]].concat();
    let ended = slurm.place(&flags).ok();
    assert_eq!(ended.err, "");
    let lines: Vec<_> = ended.out.lines().collect();
    // Only leaf 2 has room for four ranks.
    let plan = "job vision: 4 ranks and 1 aggregator of 1 shard on 2 of 3 hosts, in spine/leaf2";
    assert_eq!(lines[0], plan);
    let aggregator = format!(
        "{{ env -u SLURM_GPUS_PER_NODE srun --nodes=1 --ntasks=1 --nodelist=n3 --cpus-per-task=1 \
         --overlap --gres=none {RACKSUM} aggregator --bind 0.0.0.0 --port 7177 --identity \
         /etc/racksum/n3.pem > \"$racksum_out\"/out.n3 || touch \"$racksum_out\"/failed; }} &"
    );
    assert!(lines.contains(&aggregator.as_str()), "{}", ended.out);
    assert!(lines.contains(&"export RACKSUM_AGGREGATOR=n3:7177"), "{}", ended.out);

    let json = slurm.place(&[&["--format", "json"], &flags[..]].concat()).ok().out;
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["domain"], "spine/leaf2");
    let slurm = &json["slurm"];
    assert_eq!(slurm["aggregators"][0]["address"], "n3:7177");
    assert_eq!(slurm["aggregators"][0]["command"][6], "--nodelist=n3");
    assert_eq!(slurm["environment"]["RACKSUM_AGGREGATOR"], "n3:7177");
    assert_eq!(slurm["ranks"]["hosts"], serde_json::json!(["n3", "n3", "n4", "n4"]));
}

/// Runs the printed commands with a program in Slurm's place that writes down how it was called.
#[test]
fn the_commands_run_in_a_shell() {
    let slurm = Allocation::new("shell").with("SLURM_JOB_CPUS_PER_NODE", "20(x3)");
    let slurm = slurm.with("SLURM_NTASKS_PER_NODE", "2");
    slurm.write("job.toml", &format!("{JOB}aggregators = 4\ncpus_per_aggregator = 2\n"));
    let srun = "#!/bin/sh\nprintf '<%s>' \"$@\" \"$RACKSUM_AGGREGATOR\" > \"$0.$3\"\n\
                [ -z \"$SLURM_GPUS_PER_NODE$SLURM_NTASKS_PER_NODE\" ] || exit 1\n\
                [ -z \"$SLURM_HOSTFILE\" ] && echo serves && exit\n\
                cp \"$SLURM_HOSTFILE\" \"$0.hosts\"; exit 7\n";
    slurm.write_srun(srun);
    let flags = ["--format", "shell", "--port", "9000", "--nic-mbit", "25000"];
    let flags = [&flags[..], &["--", "--insecure", "--status-socket", "/tmp/it's $HOME"]].concat();
    let commands = slurm.place(&flags).ok().out;
    let script = format!("{commands}racksum_ranks python 'a b.py'; code=$?; wait; exit $code");
    let ended = slurm.shell(&script);
    // The exit code is that of the ranks.
    assert_eq!(ended.code, Some(7), "{ended:?}");
    let read = |name: &str| std::fs::read_to_string(slurm.folder.path(name)).unwrap();
    for host in ["n3", "n4"] {
        assert_eq!(
            read(&format!("srun.--nodelist={host}")),
            format!(
                "<--nodes=1><--ntasks=1><--nodelist={host}><--cpus-per-task=4><--overlap>\
                 <--gres=none><{RACKSUM}><aggregator><--bind><0.0.0.0><--port><9000><--shards><4>\
                 <--insecure><--status-socket></tmp/it's $HOME><>"
            )
        );
    }
    assert_eq!(
        read("srun.--ntasks=4"),
        "<--distribution=arbitrary><--nodes=2><--ntasks=4><--cpus-per-task=8>\
         <--gpus-per-task=1><python><a b.py><n3:9000+n4:9000>"
    );
    assert_eq!(read("srun.hosts"), "n3\nn3\nn4\nn4\n");
}

/// Runs the printed commands with a program in Slurm's place that starts the tasks on this host.
#[test]
fn the_commands_sum_gradients() {
    let slurm = Allocation::new("sum").with("SLURM_JOB_CPUS_PER_NODE", "16");
    let slurm = slurm.with("SLURM_JOB_NODELIST", "localhost").with("SLURM_NTASKS", "2");
    slurm.write("job.toml", &JOB.replace("ranks = 4", "ranks = 2"));
    slurm.write("topology.conf", "SwitchName=s Nodes=localhost");
    slurm.write_srun(
        "#!/bin/sh\n\
         while :; do case $1 in --ntasks=*) tasks=${1#*=};; --*) ;; *) break;; esac; shift; done\n\
         [ $tasks = 1 ] && echo $$ > \"$0.pid\" && exec timeout 120 \"$@\"\n\
         export SLURM_NTASKS=$tasks SLURM_PROCID\n\
         SLURM_PROCID=1 timeout 120 \"$@\" & SLURM_PROCID=0 \"$@\" && wait $!\n",
    );
    let port = own_port().to_string();
    let flags = ["--format", "shell", "--port", &port, "--nic-mbit", "1000", "--"];
    let aggregator = ["--bind", "127.0.0.1", "--pool-mib", "64"];
    let commands = slurm.place(&[&flags[..], &aggregator].concat()).ok().out;
    let bench = "bench -b 4K -e 4K -n 2 --rank $SLURM_PROCID --world $SLURM_NTASKS";
    let ended = slurm.shell(&format!(
        "{commands}trap 'kill $(cat {})' EXIT\nracksum_ranks sh -c 'exec \"$0\" {bench}' {RACKSUM}",
        slurm.folder.path("srun.pid")
    ));
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.out.contains("# 2 ranks, density 1"), "{ended:?}");
}

#[test]
fn ranks_do_not_start_without_their_aggregators() {
    let slurm = Allocation::new("failed");
    slurm.write_srun("#!/bin/sh\n[ -z \"$SLURM_HOSTFILE\" ] || echo ranks\nexit 1\n");
    let flags = [&RATE[..], &["--format", "shell", "--", "--insecure"]].concat();
    let commands = slurm.place(&flags).ok().out;
    let ended = slurm.shell(&format!("{commands}racksum_ranks python"));
    assert_eq!((ended.code, ended.out.as_str()), (Some(3), ""), "{ended:?}");
}

#[test]
fn the_topology_may_be_yaml_or_missing() {
    let slurm = Allocation::new("yaml");
    // Slurm prefers topology.yaml.
    slurm.write(
        "topology.yaml",
        "- topology: a\n  flat: true\n- topology: b\n  block:\n    block_sizes: [2]\n    \
         blocks:\n    - {block: b1, nodes: \"n[1,4]\"}\n    - {block: b2, nodes: \"n[2-3]\"}\n",
    );
    let yaml = slurm.folder.path("topology.yaml");
    let why = slurm.fails(&RATE);
    assert_eq!(
        why,
        format!("{yaml}: the file has several topologies; choose a or b with --topology-name")
    );
    let plan = |flags: &[&str]| {
        let ended = slurm.place(&[&RATE[..], flags, &["--", "--insecure"]].concat()).ok();
        (ended.out.lines().next().unwrap().to_owned(), ended.err)
    };
    let in_block = "job vision: 4 ranks and 1 aggregator of 1 shard on 2 of 3 hosts, in b1";
    assert_eq!(plan(&["--topology-name", "b"]), (in_block.into(), String::new()));
    let flat =
        "job vision: 4 ranks and 1 aggregator of 1 shard on 2 of 3 hosts, in the whole cluster";
    assert_eq!(plan(&["--topology-name", "a"]), (flat.into(), String::new()));
    let conf = slurm.folder.path("topology.conf");
    let in_tree = "job vision: 4 ranks and 1 aggregator of 1 shard on 2 of 3 hosts, in spine/leaf2";
    assert_eq!(plan(&["--topology", &conf]), (in_tree.into(), String::new()));
    for file in [&conf, &yaml] {
        std::fs::remove_file(file).unwrap();
    }
    let (first, warning) = plan(&[]);
    assert_eq!(first, flat);
    assert!(warning.contains(" has neither topology.yaml nor topology.conf, so "), "{warning}");
}

#[test]
fn a_topology_that_is_no_tree_is_named_with_its_line() {
    let slurm = Allocation::new("cycle");
    let cycle = format!("{TOPOLOGY}SwitchName=a Switches=b\nSwitchName=b Switches=a\n");
    slurm.write("topology.conf", &cycle);
    let file = slurm.folder.path("topology.conf");
    assert_eq!(
        slurm.fails(&RATE),
        format!(
            "{file}: line 4: the switches a > b > a form a cycle; each switch needs a way up to \
             one that nothing is above"
        )
    );
    slurm.write("topology.conf", "SwitchName=s Nodes=n[1-3]");
    assert_eq!(
        slurm.fails(&RATE),
        format!(
            "{file}: the file does not list host \"n4\"; every host needs a place in the topology"
        )
    );
}

#[test]
fn what_slurm_does_not_say_is_asked_for() {
    let slurm = Allocation::new("asks").without("SLURM_JOB_NODELIST");
    assert_eq!(
        slurm.fails(&RATE),
        "SLURM_JOB_NODELIST is not set; run this inside an allocation (salloc or sbatch), or pass \
         --hosts"
    );
    let slurm = slurm.with("SLURM_JOB_NODELIST", "n[1,3-");
    assert_eq!(slurm.fails(&RATE), "SLURM_JOB_NODELIST: \"n[1,3-\" has brackets that do not match");
    let slurm = slurm.with("SLURM_JOB_NODELIST", "n[1,3]");
    assert_eq!(
        slurm.fails(&RATE),
        "SLURM_JOB_CPUS_PER_NODE: the list has counts for 3 hosts, and the allocation has 2; pass \
         --cpus-per-node with --hosts"
    );
    let slurm = slurm.without("SLURM_JOB_CPUS_PER_NODE").without("SLURM_GPUS_PER_NODE");
    assert_eq!(
        slurm.fails(&RATE),
        "SLURM_JOB_CPUS_PER_NODE is not set; run this inside an allocation (salloc or sbatch), or \
         pass --cpus-per-node"
    );
    let slurm = slurm.with("SLURM_GPUS_ON_NODE", "2");
    let cpus = [&RATE[..], &["--cpus-per-node", "16"]].concat();
    assert_eq!(
        slurm.fails(&cpus),
        "the job needs GPUs, and Slurm does not say how many each host has (SLURM_GPUS_ON_NODE=2 \
         is about this one); pass --gpus-per-node [TYPE:]N"
    );
    let all = [&cpus[..], &["--gpus-per-node", "2", "--", "--insecure"]].concat();
    slurm.place(&all).ok();
    let some = ["--nic-mbit", "n1=100", "--cpus-per-node", "16", "--gpus-per-node", "2"];
    assert_eq!(
        slurm.fails(&some),
        "host \"n3\": the rate of its network interface is not given; give one for all hosts with \
         --nic-mbit"
    );
    let slurm = slurm.with("SLURM_NTASKS", "8");
    let warned = slurm.place(&all).ok().err;
    assert!(warned.contains("SLURM_NTASKS is 8, and the job has 4 ranks; "), "{warned}");
    let slurm = slurm.with("SLURM_NTASKS", "x");
    assert_eq!(slurm.fails(&all), "SLURM_NTASKS: \"x\" is not a whole number");
}

/// Slurm sets SLURM_JOB_NODELIST in the batch script to the hosts of the first component.
#[test]
fn a_heterogeneous_allocation_needs_the_hosts_of_a_component() {
    let slurm = Allocation::new("het").with("SLURM_HET_SIZE", "2");
    assert_eq!(
        slurm.fails(&RATE),
        "the allocation has 2 components, which are not planned together; pass the hosts of one \
         with --hosts, such as --hosts \"$SLURM_JOB_NODELIST_HET_GROUP_0\""
    );
    let flags = [&RATE[..], &["--hosts", "n[1,3-4]", "--", "--insecure"]].concat();
    slurm.place(&flags).ok();
}

#[test]
fn an_error_names_the_list_or_file_that_it_is_about() {
    let slurm = Allocation::new("twice").with("SLURM_JOB_NODELIST", "n[1,3,1]");
    assert_eq!(slurm.fails(&RATE), "SLURM_JOB_NODELIST: \"n1\" is listed twice; list it once");
    let ended = slurm.place(&[&RATE[..], &["--hosts", "n1,n1"]].concat());
    assert!(ended.err.contains("--hosts <HOSTS>': \"n1\" is listed twice"), "{ended:?}");
    let slurm = slurm.with("SLURM_JOB_NODELIST", "n[1,3-4]");
    slurm.write("topology.conf", "SwitchName=n1 Nodes=n[1-4]");
    let file = slurm.folder.path("topology.conf");
    assert_eq!(
        slurm.fails(&RATE),
        format!("{file}: \"n1\" is the name of a host and of a domain; rename one of them")
    );
}

/// Slurm would look for GPUs of a type that is called `gpu`.
#[test]
fn the_type_of_gpus_is_one_that_slurm_has() {
    let flags = [&RATE[..], &["--format", "json", "--", "--insecure"]].concat();
    for (of_slurm, of_job, flag) in
        [("2", "gpu", "--gpus-per-task=1"), ("h100:2", "h100", "--gpus-per-task=h100:1")]
    {
        let slurm = Allocation::new("gpus").with("SLURM_GPUS_PER_NODE", of_slurm);
        slurm.write("job.toml", &format!("{JOB}gpu_type = '{of_job}'\n"));
        let json: Value = serde_json::from_str(&slurm.place(&flags).ok().out).unwrap();
        let command = json["slurm"]["ranks"]["command"].as_array().unwrap();
        assert_eq!(command.last().unwrap(), flag, "{command:?}");
    }
}

#[test]
fn cores_of_tasks_limit_the_ranks_of_a_host() {
    let slurm = Allocation::new("cores");
    slurm.write("job.toml", &JOB.replace("gpus_per_rank = 1", ""));
    let flags = [&RATE[..], &["--format", "json", "--", "--insecure"]].concat();
    let json: Value = serde_json::from_str(&slurm.place(&flags).ok().out).unwrap();
    assert_eq!(json["slurm"]["ranks"]["hosts"], serde_json::json!(["n3", "n3", "n4", "n4"]));
    let slurm = slurm.with("SLURM_CPUS_PER_TASK", "9");
    let ended = slurm.place(&flags);
    assert!(ended.failed(3).contains("has 4 ranks, and there is room for 3"), "{ended:?}");
}

#[test]
fn more_aggregators_than_shards_on_a_host_are_refused() {
    let slurm = Allocation::new("shards");
    slurm.write("job.toml", &format!("{JOB}aggregators = 300\n"));
    let why = slurm.place(&[&RATE[..], &["--", "--insecure"]].concat());
    let why = why.failed(3);
    let advice = "one process has at most 64; lower `aggregators` or `shards` in the job";
    assert!(why.starts_with("the plan has ") && why.ends_with(advice), "{why}");
}

#[test]
fn the_network_of_a_cluster_serves_its_allocations() {
    let slurm = Allocation::new("net");
    let link = |of: &str| format!("[[links]]\nof = '{of}'\nup = {{ mbit = 100 }}\n");
    let inside = link("n3") + &link("spine/leaf2");
    let net = slurm.folder.path("net.toml");
    let flags = [&RATE[..], &["--net", &net, "--", "--insecure"]].concat();
    slurm.write("net.toml", &inside);
    let expected = slurm.place(&flags).ok();
    assert_eq!(expected.err, "");
    let pair = "[[pairs]]\nfrom = 'n1'\nto = 'n2'\npath = { mbit = 1 }\n";
    slurm.write("net.toml", &format!("{}{}{inside}{pair}", link("n2"), link("login")));
    let ended = slurm.place(&flags).ok();
    let warning = format!(
        "racksum: warning: {net}: 3 of 5 records left out: these links and paths have an end \
         outside the allocation\n"
    );
    assert_eq!((ended.out, ended.err), (expected.out, warning));
}

#[test]
fn flags_that_do_not_fit_together_are_refused() {
    let slurm = Allocation::new("flags");
    for own in ["--port=1", "--shards"] {
        let why = slurm.fails(&[&RATE[..], &["--", own]].concat());
        assert!(why.starts_with(&format!("remove {own} after --: ")), "{why}");
    }
    let warned = slurm.place(&RATE).ok().err;
    assert!(warned.contains("the printed aggregators have no identity"), "{warned}");
    assert_eq!(slurm.place(&[]).code, Some(2));
    let nodes = ["--nodes", "nodes.toml"];
    assert_eq!(slurm.place(&[&RATE[..], &nodes].concat()).code, Some(2));
    let rate = slurm.place(&["--nic-mbit", "25G"]);
    assert_eq!(rate.code, Some(2));
    assert!(rate.err.contains("give a number of Mbit/s from 0.001 to 1e9"), "{rate:?}");
}
