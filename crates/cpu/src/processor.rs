//! Which processor this is.

/// What makes one differ from others here.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Processor {
    /// AMD's, which copies short strings fast (FSRM): a Zen 3 or later.
    pub(crate) is_amd_fsrm: bool,
    /// AMD's with SSE 4.2, and no carry-less multiplication of 512 bits.
    pub(crate) is_amd_narrow: bool,
}

impl Processor {
    /// The one that this runs on.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn this() -> Self {
        use std::arch::x86_64::{__cpuid, __cpuid_count};
        use std::sync::OnceLock;
        /// In EDX of leaf 7.
        const FSRM: u32 = 1 << 4;
        static THIS: OnceLock<Processor> = OnceLock::new();
        *THIS.get_or_init(|| {
            let leaf = __cpuid(0);
            let vendor = [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes).concat();
            let is_amd = vendor == b"AuthenticAMD";
            let is_wide =
                is_x86_feature_detected!("vpclmulqdq") && is_x86_feature_detected!("avx512vl");
            Self {
                is_amd_fsrm: is_amd && leaf.eax >= 7 && __cpuid_count(7, 0).edx & FSRM != 0,
                is_amd_narrow: is_amd && is_x86_feature_detected!("sse4.2") && !is_wide,
            }
        })
    }

    #[cfg(not(target_arch = "x86_64"))]
    pub(crate) fn this() -> Self {
        Self::default()
    }
}
