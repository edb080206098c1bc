"""fly's rules on other engines' own code: the wheels of vLLM and SGLang, without their CUDA dependencies, run under
Triton's interpreter.

``make engines-test`` downloads the wheels (380 MB) into ``build/engines`` and runs these tests in an environment of
their own. Without it they are skipped: ``make test`` neither needs nor downloads a wheel.

``python -m tests.wheels --vllm 0.34.0`` says within minutes whether a version that was not tried fits.
"""
