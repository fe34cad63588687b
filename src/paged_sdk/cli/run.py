"""Run ``paged-sdk run``: ask a model something."""

from __future__ import annotations

from paged_sdk.cli import options

__all__ = ["run"]


def run(
    prompt: options.Prompt = None,
    model_id: options.Model = None,
    interactive: options.Interactive = False,
    system: options.System = None,
    image: options.Image = None,
    raw: options.Raw = False,
    verbose: options.Verbose = False,
    quiet: options.Quiet = False,
    version: options.Version = False,
    format: options.Format = None,
    arch: options.Arch = None,
    quantized_file: options.QuantizedFile = None,
    tok_model_id: options.TokModelId = None,
    chat_template: options.ChatTemplate = None,
    cpu: options.Cpu = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
    isq: options.Isq = None,
    topology: options.TopologyFile = None,
    imatrix: options.Imatrix = None,
    calibration_file: options.CalibrationFile = None,
    isq_cache: options.IsqCache = None,
    num_threads: options.NumThreads = None,
    paged_attn: options.PagedAttn = options.PagedAttnMode.AUTO,
    pa_context_len: options.PaContextLen = None,
    pa_memory_mb: options.PaMemoryMb = None,
    pa_memory_fraction: options.PaMemoryFraction = None,
    pa_block_size: options.PaBlockSize = None,
    pa_cache_type: options.PaCacheType = None,
    pa_gpu_mem: options.PaGpuMem = None,
    pa_gpu_mem_usage: options.PaGpuMemUsage = None,
    pa_ctxt_len: options.PaCtxtLen = None,
    pa_blk_size: options.PaBlkSize = None,
    no_paged_attn: options.NoPagedAttn = False,
    max_seqs: options.MaxSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    prefix_cache_n: options.PrefixCacheN = None,
    max_seq_len: options.MaxSeqLen = None,
    speculate: options.Speculate = None,
    draft_model: options.DraftModel = None,
    adapter: options.Adapter = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
) -> None:
    """Ask a model something, or chat with it.

    Without a prompt, on a terminal, it is a chat.
    """
    given = dict(locals())
    # Imported here, because help does not need them and should appear at once.
    from paged_sdk.cli.flags import PromptFlags, SamplingFlags, builder_of, exclusive, naming_flags
    from paged_sdk.cli.talk import talk
    from paged_sdk.cli.terminal import Terminal

    terminal = Terminal(quiet=quiet)
    with terminal.reporting(verbose=verbose), naming_flags():
        exclusive({"--verbose": verbose, "--quiet": quiet})
        prompt_flags = PromptFlags(prompt=prompt, interactive=interactive, system=system, raw=raw, image=image)
        sampling_flags = SamplingFlags(
            max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
        )
        builder = builder_of({**given, "adapters": () if adapter is None else (adapter,)})
        talk(builder, prompt_flags, sampling_flags.sampling(), terminal, arch=arch)
