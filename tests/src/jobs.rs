//! Jobs beside and after one another: each has its own sums, and gives back what it was granted.

use racksum_aggregator::Fanout;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::DType;
use racksum_worker::Client;

use crate::inputs::floats;
use crate::rig::{Rig, bounded};

/// Sums of a job, whose inputs are its own.
fn work(client: &Client, job: u16, ops: u16, world: u16) {
    for op in 0..ops {
        let elements = 60 * 256 * u64::from(op % 4 + 1) + 9;
        let value = f32::from(job) * 100.0 + f32::from(op);
        let mut tensor = floats((0..elements).map(|_| value));
        client.allreduce(&mut tensor, Descriptor::sum(elements, DType::F32)).unwrap();
        assert!(tensor == floats((0..elements).map(|_| value * f32::from(world))));
    }
}

#[test]
fn two_jobs_at_once_do_not_mix() {
    bounded(60, || {
        for fanout in [Fanout::Unicast, Fanout::Multicast] {
            let rig = Rig::start(|config| {
                config.shards = 2;
                config.fanout = fanout;
            });
            std::thread::scope(|scope| {
                for job in 1..=2 {
                    let rig = &rig;
                    scope.spawn(move || {
                        rig.ranks(
                            &format!("job {job}"),
                            3,
                            |_| {},
                            |client, _| {
                                work(client, job, 20, 3);
                            },
                        );
                    });
                }
            });
            rig.await_peace();
        }
    });
}

#[test]
fn a_job_gives_back_its_buffers() {
    bounded(30, || {
        let rig = Rig::start(|config| config.shards = 2);
        let free = |rig: &Rig| -> Vec<usize> {
            rig.aggregator.stats().iter().map(|shard| shard.buffers[1]).collect()
        };
        rig.await_peace();
        let before = free(&rig);
        rig.ranks("buffers", 3, |_| {}, |client, _| work(client, 1, 5, 3));
        rig.await_peace();
        assert_eq!(free(&rig), before);
        // A job that ends in the middle of an op gives them back as well.
        rig.ranks(
            "broken",
            2,
            |_| {},
            |client, rank| {
                if rank == 0 {
                    let sum = Descriptor::sum(60 * 256 * 100, DType::F32);
                    drop(client.submit(vec![1; 60 * 256 * 400], sum).unwrap());
                }
            },
        );
        rig.await_peace();
        assert_eq!(free(&rig), before);
    });
}

#[test]
fn twenty_jobs_in_sequence_leave_nothing_behind() {
    bounded(60, || {
        let rig = Rig::start(|config| {
            config.shards = 2;
            config.max_jobs = 2;
        });
        rig.await_peace();
        let before: Vec<_> = rig.aggregator.stats().iter().map(|shard| shard.buffers).collect();
        let files = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let mut open = 0;
        for job in 0..20 {
            // The same name again and again: a new job each time.
            rig.ranks("same", 3, |_| {}, |client, _| work(client, job, 3, 3));
            if job == 0 {
                open = files();
            }
        }
        rig.await_peace();
        let after: Vec<_> = rig.aggregator.stats().iter().map(|shard| shard.buffers).collect();
        assert_eq!(after, before);
        // Other tests of this process open some meanwhile, but not ten a job.
        assert!(files() < open + 200, "{open} files became {}", files());
    });
}

#[test]
fn ranks_of_many_jobs_come_and_go_at_random() {
    bounded(60, || {
        let rig = Rig::start(|config| config.max_jobs = 8);
        std::thread::scope(|scope| {
            for job in 0..6u16 {
                let rig = &rig;
                scope.spawn(move || {
                    for life in 0..5 {
                        let world = (job + life) % 4 + 1;
                        rig.ranks(
                            &format!("job {job}"),
                            world,
                            |_| {},
                            |client, _| {
                                work(client, job, life, world);
                            },
                        );
                    }
                });
            }
        });
        rig.await_peace();
    });
}
