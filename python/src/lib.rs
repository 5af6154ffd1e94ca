//! The Python extension `racksum._racksum`, a thin binding to the worker. Users import the package
//! `racksum`, which wraps this extension. To read the code, start with `session`.

mod connected;
mod errors;
mod logs;
mod memory;
mod op;
mod options;
mod patience;
mod session;
mod turn;

use pyo3::pymodule;

#[pymodule(name = "_racksum")]
mod extension {
    #[pymodule_export]
    use crate::logs::{keep_logs, take_logs};
    #[pymodule_export]
    use crate::memory::scan;
    #[pymodule_export]
    use crate::op::{Op, Sums};
    #[pymodule_export]
    use crate::session::{Lent, Session};
    #[pymodule_export]
    use crate::turn::CallTurn;

    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");
}
